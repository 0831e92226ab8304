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


@dataclass(frozen=True)
class Fault:
    """One fault, and what it cost."""

    kind: str
    pause: Pause
    """The longest time without the end of a step until all workers trained again."""
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

    def workers(self) -> list[psutil.Process]:
        """Return the workers of all hosts."""
        return [worker for host in ALL for worker in self.hosts.workers(host)]

    def ends(self, workers: list[psutil.Process]) -> None:
        """Wait until workers whose driver is gone have noticed it, committed, and ended."""
        wait_for("the workers to end", lambda: not {*workers} & {*self.workers()}, limit_s=150)

    def type_again(self) -> None:
        """Type the command of the job once more."""
        count = len(list(self.job.folder.glob("output*.txt")))
        line = command(self.hosts, self.job.folder, OPTIONS, TRAINING, start_on=LAUNCHER)
        output = self.job.folder / f"output-{count + 1}.txt"
        self.job.launcher = self._typed.enter_context(started(line, self.job.folder, output))

    def goes_on_without(self, workers: list[psutil.Process]) -> None:
        """Boot the launcher's host and type the command again, at once or when the workers of before have ended."""
        if self.chance.random() < 0.5:
            self.ends(workers)
        self.hosts.boot(LAUNCHER)
        self.type_again()
        self.ends(workers)

    def sees(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds, or the training is over."""
        wait_for("what is to come", lambda: self.is_over or condition(), limit_s=180)

    def becomes_whole(self) -> None:
        """Wait until three workers compute, and have done so for a few steps, or the training is over."""
        begun = self.watch.last

        def ready() -> bool:
            return self.is_over or (self.watch.last >= begun + 5 and self._is_whole())

        wait_for("the world to be whole", ready, limit_s=400)

    def _is_whole(self) -> bool:
        """Return whether the world has three workers, none of which is still being given the state."""
        last = self.job.worlds[-1]
        settled = not last.get("came") or self.watch.last >= last["step"] + HANDOVER_STEPS
        return last["world_size"] == 3 and settled


def kill(campaign: Campaign) -> None:
    """Kill one worker, or two at once, by SIGKILL."""
    for host in campaign.chance.sample(ALL, campaign.chance.choice((1, 1, 2))):
        campaign.kill(host)


def kill_twice(campaign: Campaign) -> None:
    """Kill one worker, and another while the others recover or the first comes back."""
    for host in campaign.chance.sample(ALL, 2):
        campaign.kill(host)
        time.sleep(campaign.chance.uniform(0, 8))


def kill_in_handover(campaign: Campaign) -> None:
    """Kill one worker, and when its successor is being given the state, that one or another one."""
    before = len(campaign.job.changes)
    campaign.kill(campaign.chance.choice(ALL))
    campaign.sees(lambda: any(change["came"] for change in campaign.job.changes[before:]))
    time.sleep(campaign.chance.uniform(0, 8))
    campaign.kill(campaign.chance.choice(ALL))


def stop(campaign: Campaign) -> None:
    """Stop a worker by SIGSTOP, for a while or for good."""
    for worker in campaign.hosts.workers(campaign.chance.choice(ALL)):
        worker.send_signal(signal.SIGSTOP)
        if campaign.chance.random() < 0.5:
            time.sleep(campaign.chance.uniform(0.5, 12))
            if worker.is_running():
                worker.send_signal(signal.SIGCONT)


def abort(campaign: Campaign) -> None:
    """Crash a worker as native code does, by SIGABRT."""
    for worker in campaign.hosts.workers(campaign.chance.choice(ALL)):
        worker.send_signal(signal.SIGABRT)


def lose_host(campaign: Campaign) -> None:
    """Kill a host, with its connections closed or silent, and start it again after a while."""
    host = campaign.chance.choice(ALL)
    campaign.power_off(host)
    time.sleep(campaign.chance.uniform(0, 10))
    campaign.hosts.boot(host)


def unplug(campaign: Campaign) -> None:
    """Cut a host's network for a while."""
    host = campaign.chance.choice(ALL)
    campaign.hosts.unplug(host)
    time.sleep(campaign.chance.uniform(0.2, 12))
    campaign.hosts.plug(host)


def unplug_driver(campaign: Campaign) -> None:
    """Cut the network of the launcher's host for less time than that in which workers take it for dead."""
    campaign.hosts.unplug(LAUNCHER)
    time.sleep(campaign.chance.uniform(0.2, 7))
    campaign.hosts.plug(LAUNCHER)


def cut_off_driver(campaign: Campaign) -> None:
    """Cut the network of the launcher's host until the workers have taken the driver for dead, and a little longer."""
    workers = campaign.workers()
    campaign.hosts.unplug(LAUNCHER)
    time.sleep(campaign.chance.uniform(11, 16))
    campaign.hosts.plug(LAUNCHER)
    campaign.ends(workers)


def kill_driver(campaign: Campaign) -> None:
    """Kill the driver: the workers commit and end, and the supervisor gives its command again."""
    workers = campaign.workers()
    campaign.job.driver.kill()
    campaign.ends(workers)


def lose_launcher(campaign: Campaign) -> None:
    """Kill the host of launcher, supervisor and driver; the same command is typed again, at once or when all is quiet.

    Near its end the training could end meanwhile, and the same command would rightly begin another run.
    """
    if campaign.watch.last > STEPS - 60:
        kill_driver(campaign)
        return
    workers = campaign.workers()
    campaign.power_off(LAUNCHER)
    campaign.goes_on_without(workers)


def lose_two_hosts(campaign: Campaign) -> None:
    """Kill the host of launcher and driver, and one with a worker at any time until all have noticed that.

    The survivors commit, be it rank 0 that is gone. The same command is typed as in `lose_launcher`.
    """
    if campaign.watch.last > STEPS - 60:
        lose_host(campaign)
        return
    workers, host = campaign.workers(), campaign.chance.choice(ALL)
    campaign.power_off(LAUNCHER)
    time.sleep(campaign.chance.uniform(0, 12))
    campaign.power_off(host)
    campaign.hosts.boot(host)
    campaign.goes_on_without(workers)


def kill_out_of_reach(campaign: Campaign) -> None:
    """Kill a worker while the network of the launcher's host is away: the others wait until they can ask the driver."""
    campaign.hosts.unplug(LAUNCHER)
    time.sleep(campaign.chance.uniform(0, 4))
    campaign.kill(campaign.chance.choice(ALL))
    time.sleep(campaign.chance.uniform(0, 3))
    campaign.hosts.plug(LAUNCHER)


def tell_to_go(campaign: Campaign) -> None:
    """Send SIGTERM to all processes of a host, as before a spot host goes, and list it anew after a while."""
    host = campaign.chance.choice(ALL)
    campaign.hosts.signal_all(host, signal.SIGTERM)
    time.sleep(campaign.chance.uniform(2, 6))
    campaign.job.list(*(other for other in ALL if other != host))
    time.sleep(campaign.chance.uniform(2, 6))
    campaign.job.list(*ALL)


def relist(campaign: Campaign) -> None:
    """Take hosts out of the list, and put them back after a while."""
    campaign.job.list(*campaign.chance.sample(ALL, campaign.chance.choice((1, 2))))
    time.sleep(campaign.chance.uniform(0.2, 10))
    campaign.job.list(*ALL)


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
