"""A campaign of random faults on three hosts: `make campaign`, for a given time, from a seed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from hvd_train.run_files.run_folder import SUMMARY
from tests.support import hosts as cluster
from tests.support.elastic_hosts import ALL, STEPS_PER_EPOCH, Job, arguments, check, command, job, undisturbed
from tests.support.hosts import Hosts
from tests.support.large_model import TO_TRAIN, tolerance
from tests.support.launching import started, wait_for
from tests.support.watch import Pause, Watch

SECONDS = float(os.environ.get("CAMPAIGN_SECONDS", "1800"))
SEED = int(os.environ.get("CAMPAIGN_SEED", "0"))
EPOCHS = 10
STEPS = EPOCHS * STEPS_PER_EPOCH
LAUNCHER = "h4"
LONG_S = 15.0
"""A pause that is longer is shown with all that was printed in it."""
HANDOVER_STEPS = 40
"""In fewer steps a newcomer is given all of the state (30, 16 MB beside each); then the ranks meet, and it computes."""
OPTIONS = ("--restarts", "100")
# No --output-dir: whatever befalls the job, the same command finds its run again. One evaluation, at the end: a pause
# is then that of a fault.
MORE = f"{TO_TRAIN} --commit-steps 20 --keep-checkpoints 2 --eval-epochs {EPOCHS}"
TRAINING = arguments(EPOCHS, "tests.support.large_model:wide", MORE)
NO_HOSTS = cluster.missing()

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.timeout(int(SECONDS) + 2700),
    pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS or "-"),
]


class Fault(NamedTuple):
    """One fault, the longest time without the end of a step until all workers trained again, and the steps lost."""

    kind: str
    pause: Pause
    steps_lost: int


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Run h1, h2 and h3 for workers, and h4 for the launcher and the driver; all of them are mortal."""
    with cluster.hosts(tmp_path / "cluster", 4, names=4) as found:
        yield found


@dataclass
class Campaign:
    """A training that is disturbed."""

    job: Job
    watch: Watch
    chance: random.Random
    _typed: ExitStack
    """Holds the commands that were typed after the first."""

    @property
    def hosts(self) -> Hosts:
        """The hosts of the job."""
        return self.job.hosts

    @property
    def is_over(self) -> bool:
        """Whether the command that was typed last has ended."""
        return self.job.launcher.poll() is not None

    def kill(self, host: str) -> None:
        """Kill the workers of a host by SIGKILL."""
        for worker in self.hosts.workers(host):
            worker.kill()

    def power_off(self, host: str) -> None:
        """Kill a host, with its connections closed or silent."""
        self.chance.choice((self.hosts.kill, self.hosts.power_off))(host)

    def pause(self, least: float, most: float) -> None:
        """Wait for a random time."""
        time.sleep(self.chance.uniform(least, most))

    def a_host(self) -> str:
        """Return one of the hosts with a worker."""
        return self.chance.choice(ALL)

    def without_network(self, host: str, least: float, most: float) -> None:
        """Cut the network of a host for a random time."""
        self.hosts.unplug(host)
        self.pause(least, most)
        self.hosts.plug(host)

    def workers(self) -> list[psutil.Process]:
        """Return the workers of all hosts."""
        return [worker for host in ALL for worker in self.hosts.workers(host)]

    def ends(self, workers: list[psutil.Process]) -> None:
        """Wait until workers whose driver is gone have noticed it, committed, and ended."""
        wait_for("the workers to end", lambda: not {*workers} & {*self.workers()}, limit_s=600)

    def goes_on_without(self, workers: list[psutil.Process]) -> None:
        """Boot the launcher's host and type the command again, at once or when the earlier workers have ended."""
        if self.chance.random() < 0.5:
            self.ends(workers)
        self.hosts.boot(LAUNCHER)
        count = len(list(self.job.folder.glob("output*.txt")))
        line = command(self.hosts, self.job.folder, OPTIONS, TRAINING, start_on=LAUNCHER)
        output = self.job.folder / f"output-{count + 1}.txt"
        self.job.launcher = self._typed.enter_context(started(line, self.job.folder, output))
        self.ends(workers)

    def sees(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds, or the training is over."""
        wait_for("what is to come", lambda: self.is_over or condition(), limit_s=600)

    def becomes_whole(self) -> None:
        """Wait until three workers compute, all have the state and took a few steps, or the training is over."""
        begun = self.watch.last

        def whole() -> bool:
            last = self.job.worlds[-1]
            settled = not last.get("came") or self.watch.last >= last["step"] + HANDOVER_STEPS
            return last["world_size"] == 3 and settled and self.watch.last >= begun + 5

        self.sees(whole)


def kill(it: Campaign) -> None:
    for host in it.chance.sample(ALL, it.chance.choice((1, 1, 2))):
        it.kill(host)


def kill_twice(it: Campaign) -> None:
    """The second time while the others recover or the first comes back."""
    for host in it.chance.sample(ALL, 2):
        it.kill(host)
        it.pause(0, 8)


def kill_in_handover(it: Campaign) -> None:
    """Kill one worker and, when its successor is being given the state, that one or another one."""
    before = len(it.job.changes)
    it.kill(it.a_host())
    it.sees(lambda: any(change["came"] for change in it.job.changes[before:]))
    it.pause(0, 8)
    it.kill(it.a_host())


def stop(it: Campaign) -> None:
    """For a while or for good."""
    for worker in it.hosts.workers(it.a_host()):
        worker.send_signal(signal.SIGSTOP)
        if it.chance.random() < 0.5:
            it.pause(0.5, 12)
            if worker.is_running():
                worker.send_signal(signal.SIGCONT)


def abort(it: Campaign) -> None:
    for worker in it.hosts.workers(it.a_host()):
        worker.send_signal(signal.SIGABRT)


def lose_host(it: Campaign) -> None:
    host = it.a_host()
    it.power_off(host)
    it.pause(0, 10)
    it.hosts.boot(host)


def unplug(it: Campaign) -> None:
    it.without_network(it.a_host(), 0.2, 12)


def unplug_driver(it: Campaign) -> None:
    """For less time than that in which workers take the driver for dead."""
    it.without_network(LAUNCHER, 0.2, 7)


def cut_off_driver(it: Campaign) -> None:
    """Until the workers have taken the driver for dead, and a little longer."""
    workers = it.workers()
    it.without_network(LAUNCHER, 11, 16)
    it.ends(workers)


def kill_driver(it: Campaign) -> None:
    """The workers commit and end, and the supervisor gives its command again."""
    workers = it.workers()
    it.job.driver.kill()
    it.ends(workers)


def lose_launcher(it: Campaign) -> None:
    """Kill the host of launcher, supervisor and driver; the same command is typed again.

    Near its end the training could end meanwhile, and the same command would rightly begin another run.
    """
    if it.watch.last > STEPS - 60:
        return kill_driver(it)
    workers = it.workers()
    it.power_off(LAUNCHER)
    return it.goes_on_without(workers)


def lose_two_hosts(it: Campaign) -> None:
    """Kill the launcher's host, and one with a worker at any time until all have noticed that; type it again."""
    if it.watch.last > STEPS - 60:
        return lose_host(it)
    workers, host = it.workers(), it.a_host()
    it.power_off(LAUNCHER)
    it.pause(0, 12)
    it.power_off(host)
    it.hosts.boot(host)
    return it.goes_on_without(workers)


def kill_out_of_reach(it: Campaign) -> None:
    """Kill a worker while the network of the launcher's host is away: the others wait until they can ask the driver."""
    it.hosts.unplug(LAUNCHER)
    it.pause(0, 4)
    it.kill(it.a_host())
    it.pause(0, 3)
    it.hosts.plug(LAUNCHER)


def tell_to_go(it: Campaign) -> None:
    """Send SIGTERM to all processes of a host, as before a spot host goes, and list it again after a while."""
    host = it.a_host()
    it.hosts.signal_all(host, signal.SIGTERM)
    it.pause(2, 6)
    it.job.list(*(other for other in ALL if other != host))
    it.pause(2, 6)
    it.job.list(*ALL)


def relist(it: Campaign) -> None:
    it.job.list(*it.chance.sample(ALL, it.chance.choice((1, 2))))
    it.pause(0.2, 10)
    it.job.list(*ALL)


FAULTS: list[Callable[[Campaign], None]] = [
    *(kill, kill_twice, kill_in_handover, stop, abort, lose_host, unplug, tell_to_go, relist),
    *(unplug_driver, kill_out_of_reach, cut_off_driver, kill_driver, lose_launcher, lose_two_hosts),
]


def test_campaign(hosts: Hosts, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After any faults that leave a worker, no step is lost, each sample counts once, and weights are undisturbed.

    The state has 500 MB, and the command names no run folder: through all faults the run stays in the one that the job
    has made.
    """
    chance = random.Random(SEED)
    (tmp_path / "undisturbed").mkdir()
    expected = undisturbed(tmp_path / "undisturbed", EPOCHS, TRAINING, limit_s=1500)
    shutil.rmtree(tmp_path / "undisturbed")
    allowed = tolerance(expected, STEPS)
    faults, trainings, furthest = list[Fault](), 0, 0.0
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        folder = tmp_path / str(trainings)
        folder.mkdir()
        done: list[Fault] = []
        with (
            ExitStack() as typed,
            job(hosts, folder, *OPTIONS, training=TRAINING, start_on=LAUNCHER) as running,
            Watch(folder) as watch,
        ):
            campaign = Campaign(running, watch, chance, typed)
            campaign.sees(lambda watch=watch: watch.last >= 3)  # type: ignore[misc]
            while not campaign.is_over:
                done.append(play(chance.choice(FAULTS), campaign))
                with capsys.disabled():
                    show(done[-1], campaign)
        failed = f"training {trainings} of seed {SEED}, after {[fault.kind for fault in done]}: {folder}"
        assert running.launcher.returncode == 0, f"{failed}\n{running.output}"
        assert (running.run / SUMMARY).exists(), failed
        assert watch.lost == 0, failed
        difference = check(running, expected, EPOCHS, allowed)
        furthest = max(furthest, difference)
        faults += done
        trainings += 1
        shutil.rmtree(folder)
        with capsys.disabled():
            print(f"training {trainings}: done; weights differ by {difference:.1e} of {allowed:.1e}", flush=True)
    with capsys.disabled():
        print(f"\n{trainings} trainings of {STEPS} steps; weights differ by {furthest:.1e} of {allowed:.1e} at most\n")
        print("\n".join(table(faults)), flush=True)


def play(fault: Callable[[Campaign], None], campaign: Campaign) -> Fault:
    """Play a fault until all workers train again, and return what it has cost."""
    begun, lost = time.time(), campaign.watch.lost
    fault(campaign)
    campaign.becomes_whole()
    return Fault(fault.__name__, campaign.watch.pause(begun), campaign.watch.lost - lost)


def show(fault: Fault, campaign: Campaign) -> None:
    """Print one fault, and what was printed in a pause that is long."""
    load = os.getloadavg()[0]
    step, seconds, now = campaign.watch.last, fault.pause.seconds, time.strftime("%H:%M:%S")
    print(f"{now} step {step:3}: {fault.kind:14} pause {seconds:5.1f} s, load {load:.1f}", flush=True)
    if seconds > LONG_S:
        print("\n".join(campaign.watch.printed(fault.pause)), flush=True)


def table(faults: list[Fault]) -> list[str]:
    """Return the faults by kind, as a table of Markdown."""
    lines = ["| fault | times | pause, median | longest | steps lost |", "|---|---|---|---|---|"]
    for kind in (function.__name__ for function in FAULTS):
        those = [fault for fault in faults if fault.kind == kind]
        if those:
            pauses = [fault.pause.seconds for fault in those]
            lost = sum(fault.steps_lost for fault in those)
            figures = f"{statistics.median(pauses):.1f} s | {max(pauses):.1f} s | {lost}"
            lines.append(f"| {kind.replace('_', ' ')} | {len(those)} | {figures} |")
    return lines
