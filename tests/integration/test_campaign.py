"""`make campaign`: random faults on three hosts, for a given time, from a seed."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from hvd_train.run_files.run_folder import SUMMARY
from tests.support import hosts as cluster
from tests.support.hosts import (
    ALL,
    NO_HOSTS,
    STEPS_PER_EPOCH,
    Hosts,
    Job,
    arguments,
    command,
    hosts_fixture,
    job,
)
from tests.support.launching import json_lines, started, wait_for
from tests.support.on_demand import TO_TRAIN, end_slowly, hold_lock, tolerance

SECONDS = float(os.environ.get("CAMPAIGN_SECONDS", "1800"))
SEED = int(os.environ.get("CAMPAIGN_SEED", "0"))
REDUCTION = os.environ.get("CAMPAIGN_REDUCTION", "fast")
EPOCHS = 10
STEPS = EPOCHS * STEPS_PER_EPOCH
COMMIT_STEPS = 20
LAUNCHER = "h4"
# No --output-dir: the same command finds its run again. One evaluation, at the end: only faults
# cause a pause.
MORE = f"{TO_TRAIN} --commit-steps {COMMIT_STEPS} --keep-checkpoints 2 --eval-epochs {EPOCHS} "
MORE += f"--reduction {REDUCTION}"
TRAINING = arguments(EPOCHS, "tests.support.on_demand:wide", MORE)

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.timeout(int(SECONDS) + 2700),
    pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS or "-"),
]

hosts = hosts_fixture(4)  # workers on h1, h2 and h3; launcher and driver on h4


class Watch(threading.Thread):
    """Watch the metrics of a job, which log every step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder = folder
        self.over = threading.Event()
        self.seen = set[tuple[int, float]]()  # the numbers and times of steps
        self.last = 0  # the number of the step that was finished last
        self.lost = 0  # steps that were finished and had to be taken again

    def run(self) -> None:
        while not self.over.wait(0.05):
            lines = [
                line
                for path in self.folder.glob("runs/*/metrics.jsonl")
                for line in json_lines(path)
            ]
            steps = {(line["step"], line["time"]) for line in lines if line["kind"] == "step"}
            for step, written in sorted(steps - self.seen):
                self.lost += any(step <= earlier for earlier, _ in self.seen)
                self.seen.add((step, written))
                self.last = step


@dataclass
class Campaign:
    """A training that is disturbed."""

    job: Job
    watch: Watch
    chance: random.Random
    typed: ExitStack  # the commands that were typed after the first
    left_out: int = 0  # how many lines have named hosts that are left out
    may_lose: int = 0  # how many steps may be lost: driver and rank 0 were perhaps gone together

    @property
    def is_over(self) -> bool:
        return self.job.launcher.poll() is not None

    @property
    def hosts(self) -> Hosts:
        return self.job.hosts

    def kill(self, host: str) -> None:
        for worker in self.hosts.workers(host):
            worker.kill()

    def power_off(self, host: str) -> None:
        """Kill a host; its connections are closed or stay silent."""
        self.chance.choice((self.hosts.kill, self.hosts.power_off))(host)

    def pause(self, least: float, most: float) -> None:
        time.sleep(self.chance.uniform(least, most))

    def a_host(self) -> str:
        return self.chance.choice(ALL)

    def workers(self) -> list[psutil.Process]:
        return [worker for host in ALL for worker in self.hosts.workers(host)]

    def ends(self, workers: list[psutil.Process]) -> None:
        """Wait until workers that lost their driver have committed and ended."""
        wait_for("the workers to end", lambda: not {*workers} & {*self.workers()}, limit_s=600)

    def type_again(self, workers: list[psutil.Process]) -> None:
        """Repeat the command, perhaps only after the earlier workers have ended."""
        if self.chance.random() < 0.5:
            self.ends(workers)
        if LAUNCHER not in self.hosts.inits:
            self.hosts.boot(LAUNCHER)
        folder = self.job.folder
        output = folder / f"output-{len(list(folder.glob('output*.txt'))) + 1}.txt"
        line = command(self.hosts, folder, (), TRAINING, start_on=LAUNCHER)
        self.job.launcher = self.typed.enter_context(started(line, folder, output))
        self.ends(workers)

    def wait(self, condition: Callable[[], object]) -> None:
        wait_for("an event of the campaign", lambda: self.is_over or condition(), limit_s=600)

    def relist_left_out(self) -> None:
        """List hosts again that the job does not use since their newcomers could not connect."""
        lines = re.findall(
            r"could not connect to the newcomers on (\S+(?:, \S+)*) \(", self.job.output
        )
        for hosts in lines[self.left_out :]:
            self.job.list(*(host for host in ALL if host not in hosts.split(", ")))
            self.pause(2, 4)
            self.job.list(*ALL)
        self.left_out = len(lines)

    def play(self, fault: Callable[[Campaign], None]) -> str:
        """Play a fault until three workers took a few steps together; return its cost."""
        begun = time.monotonic()
        lost = self.watch.lost
        fault(self)
        first = self.watch.last

        def is_whole() -> bool:
            self.relist_left_out()
            last = self.job.worlds[-1]
            return (
                last["world_size"] == 3 and self.watch.last >= max(first, last.get("step", 0)) + 5
            )

        self.wait(is_whole)
        seconds = time.monotonic() - begun
        lost = self.watch.lost - lost
        return f"step {self.watch.last:3}: {fault.__name__:17} {seconds:5.1f} s, {lost} steps lost"

    def kill_workers(self) -> None:
        """Kill one or two workers, the second one perhaps while a new worker receives the state."""
        self.kill(self.a_host())
        if self.chance.random() < 0.5:
            self.pause(0, 15)
            self.kill(self.a_host())

    def kill_catching_up(self) -> None:
        """Kill workers of two hosts in turns, also while the others or a
        new worker load the state.
        """
        one, two = self.chance.sample(ALL, 2)
        for host in (one, two, one):
            self.kill(host)
            self.pause(0, 8)

    def hold_lock(self) -> None:
        """Let C code hold Python's lock for longer than a worker may be silent."""
        hold_lock(self.job.folder, self.a_host(), 13)
        self.pause(13, 15)

    def end_slowly(self) -> None:
        """Let processes of a host take long to end, when they are
        stopped or the training is done.
        """
        end_slowly(self.job.folder, self.a_host(), 13)

    def stop(self) -> None:
        """Stop a worker for a while or forever."""
        for worker in self.hosts.workers(self.a_host()):
            worker.send_signal(signal.SIGSTOP)
            if self.chance.random() < 0.5:
                self.pause(0.5, 12)
                if worker.is_running():
                    worker.send_signal(signal.SIGCONT)

    def lose_host(self) -> None:
        host = self.a_host()
        self.power_off(host)
        self.pause(0, 10)
        self.hosts.boot(host)

    def unplug(self) -> None:
        """Cut the network of a worker, or of the driver for less time than workers wait for it."""
        host = self.chance.choice((*ALL, LAUNCHER))
        self.hosts.unplug(host)
        self.pause(0.2, 7 if host == LAUNCHER else 12)
        self.hosts.plug(host)

    def kill_driver(self) -> None:
        """Kill the driver and repeat the command; near the end that could start another run."""
        if self.watch.last > STEPS - 60:
            return self.kill_workers()
        workers = self.workers()
        self.job.driver.kill()
        return self.type_again(workers)

    def lose_launcher(self) -> None:
        """Kill the launcher's host, perhaps a worker's host as well, and repeat the command."""
        if self.watch.last > STEPS - 60:
            return self.kill_workers()
        workers = self.workers()
        self.power_off(LAUNCHER)
        if self.chance.random() < 0.5:
            self.may_lose += COMMIT_STEPS
            self.pause(0, 12)
            self.lose_host()
        return self.type_again(workers)


FAULTS = [
    *(Campaign.kill_workers, Campaign.stop, Campaign.lose_host),
    *(Campaign.unplug, Campaign.kill_driver, Campaign.lose_launcher),
    *(Campaign.kill_catching_up, Campaign.hold_lock, Campaign.end_slowly),
]


def test_campaign(hosts: Hosts, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No fault that leaves rank 0 or the driver costs a step; none repeats a
    sample or changes the weights.
    """
    chance = random.Random(SEED)
    (tmp_path / "undisturbed").mkdir()
    expected = cluster.undisturbed(tmp_path / "undisturbed", EPOCHS, TRAINING, limit_s=1500)
    shutil.rmtree(tmp_path / "undisturbed")
    allowed = tolerance(expected, STEPS) if REDUCTION == "fast" else 0.0
    trainings = 0
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        folder = tmp_path / str(trainings)
        folder.mkdir()
        with (
            capsys.disabled(),
            ExitStack() as typed,
            job(hosts, folder, training=TRAINING, start_on=LAUNCHER) as running,
        ):
            watch = Watch(folder)
            watch.start()
            campaign = Campaign(running, watch, chance, typed)
            campaign.wait(lambda watch=watch: watch.last >= 3)  # type: ignore[misc]
            while not campaign.is_over:
                print(time.strftime("%H:%M:%S"), campaign.play(chance.choice(FAULTS)), flush=True)
            watch.over.set()
            watch.join()
        failed = f"training {trainings} of seed {SEED}: {folder}"
        assert running.launcher.returncode == 0, f"{failed}\n{running.output}"
        assert (running.run / SUMMARY).exists(), failed
        assert watch.lost <= campaign.may_lose, failed
        difference = cluster.check(running, expected, EPOCHS, allowed)
        trainings += 1
        shutil.rmtree(folder)
        with capsys.disabled():
            print(
                f"training {trainings}: done; weights differ by {difference:.1e} of {allowed:.1e}",
                flush=True,
            )
