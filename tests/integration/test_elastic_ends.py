"""Ends that are nobody's fault: the driver out of reach or dead, the first host gone, a host that is told to go."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvd_train import checkpoint
from tests.support import hosts as cluster
from tests.support import on_demand
from tests.support.elastic_hosts import OBEDIENT, ON_HOSTS, STEPS_PER_EPOCH, arguments, check, job, undisturbed
from tests.support.hosts import Hosts
from tests.support.launching import wait_for
from tests.support.runs import Weights

EPOCHS = 4
STEPS = EPOCHS * STEPS_PER_EPOCH
AWAY_S = 6.0  # less than the 10 s after which workers take the driver for dead

pytestmark = ON_HOSTS


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Return the weights of the undisturbed run of one process."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), EPOCHS)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Run h1, h2 and h3."""
    with cluster.hosts(tmp_path / "cluster", 3, names=3) as found:
        yield found


def training(*more: str) -> list[str]:
    """Return the arguments of a training that takes its time as a test orders."""
    return [*arguments(EPOCHS, OBEDIENT), *more]


def newest_commit(run: Path) -> int:
    """Return the step of the newest checkpoint of a run, which must be whole."""
    snapshot = checkpoint.newest_good(run, pytest.fail)
    return snapshot["progress"]["step"] if snapshot else 0


def test_a_driver_that_is_out_of_reach_and_then_dies(hosts: Hosts, tmp_path: Path, expected: Weights) -> None:
    """A login node that is cut off for seconds costs no worker and no step; one whose driver is killed, no step.

    In between a worker is killed whose ssh has been lost: only its silence tells of its end.
    """
    on_demand.pace(tmp_path, 0.1)
    with job(hosts, tmp_path, listed=("h2", "h3"), training=training("--commit-steps", "1000")) as running:
        running.after(8)
        before = [running.worker(name).pid for name in ("h2", "h3")]
        hosts.unplug("h1")
        time.sleep(AWAY_S)
        hosts.plug("h1")
        running.after(running.steps + 10)
        wait_for("the lost ssh to be told", lambda: running.output.count("its heartbeats still come") == 2)
        assert [running.worker(name).pid for name in ("h2", "h3")] == before
        assert not running.changes

        running.worker("h2").kill()
        running.reaches(1)
        running.reaches(2)
        running.after(running.steps + 5)

        steps = running.steps
        running.driver.kill()
        wait_for("a commit", lambda: newest_commit(running.run) >= steps)
        on_demand.pace(tmp_path, 0)
        running.launcher.wait(280)
        check(running, expected, EPOCHS)
    assert running.launcher.returncode == 0, running.output
    assert "BrokenPipe" not in running.output


def test_the_first_host_powers_off(hosts: Hosts, tmp_path: Path, expected: Weights) -> None:
    """Launcher, driver and rank 0 vanish without a word: what the survivors have done is committed, to the last step.

    The same command, typed at once on another host, waits for that and goes on from there, though it names no run
    folder.
    """
    on_demand.pace(tmp_path, 0.1)
    never = arguments(EPOCHS, OBEDIENT, "--commit-steps 1000")
    with job(hosts, tmp_path, training=never) as running:
        running.after(30)
        hosts.power_off("h1")
        steps = running.steps
        with job(hosts, tmp_path, listed=("h2", "h3"), training=never, start_on="h2") as again:
            wait_for("the next job", lambda: "going on at" in again.output)
            on_demand.pace(tmp_path, 0)
            assert again.launcher.wait(280) == 0, again.output
            check(again, expected, EPOCHS)
    committed = int(again.output.split("going on at", 1)[1].splitlines()[0].split("step ")[1])
    assert committed >= steps
    journal = (again.run / "metrics.jsonl").read_text()
    assert f"step {committed} is committed in runs/{again.run.name}/checkpoints/step-{committed:010}.ckpt" in journal


def test_a_host_that_is_told_to_go(hosts: Hosts, tmp_path: Path, expected: Weights) -> None:
    """SIGTERM to all processes of a host makes that host leave, rank 0's as well; to those of all, it ends the job."""
    on_demand.pace(tmp_path, 0.1)
    with job(hosts, tmp_path, listed=("h3", "h2", "h1"), training=training("--commit-steps", "1000")) as running:
        running.after(10)
        for left, name in enumerate(("h2", "h3"), start=1):  # h3 has rank 0
            steps = running.steps
            hosts.signal_all(name, signal.SIGTERM)
            running.reaches(3 - left)
            wait_for("its commit", lambda least=steps: newest_commit(running.run) >= least)
            wait_for("its worker to end", lambda gone=name: not hosts.workers(gone))
            running.after(running.steps + 5)
        assert not hosts.workers("h3") and not hosts.workers("h2")
        for name in ("h2", "h3"):
            assert running.output.count(f"worker {name}[0] is taken out: it was told to end") == 1
        steps = running.steps
        running.worker("h1").send_signal(signal.SIGTERM)
        assert running.launcher.wait(200) == 128 + signal.SIGTERM, running.output
        assert newest_commit(running.run) >= steps
    on_demand.pace(tmp_path, 0)
    with job(hosts, tmp_path, training=training("--commit-steps", "1000")) as running:
        assert running.launcher.wait(280) == 0, running.output
        check(running, expected, EPOCHS)
