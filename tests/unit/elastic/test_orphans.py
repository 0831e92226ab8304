"""Workers that the job has given up leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hvd_train.elastic import orphans
from hvd_train.launch.launcher import JOB, REPLACES, WORKER
from tests.support.launching import wait_for

FOREVER = [sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"]


@pytest.fixture
def workers() -> Iterator[dict[tuple[str, str], subprocess.Popen[str]]]:
    """Processes by their job and number, all of them up."""
    found = {}
    for job, number in (("a", "1000"), ("a", "1001"), ("b", "1000")):
        environment = {**os.environ, JOB: job, WORKER: number}
        found[job, number] = subprocess.Popen(FOREVER, env=environment, stdout=subprocess.PIPE, text=True)
    for process in found.values():
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
    yield found
    for process in found.values():
        process.kill()
        process.communicate()


def test_a_stopped_predecessor_is_cleared_away(workers: dict[tuple[str, str], subprocess.Popen[str]]) -> None:
    """A process that takes a place kills the one that had it, though it is stopped; all others live."""
    old = workers["a", "1000"]
    old.send_signal(signal.SIGSTOP)
    orphans.kill_predecessor({JOB: "a", WORKER: "1002", REPLACES: "1000"})
    assert old.wait(10) == -signal.SIGKILL
    assert workers["a", "1001"].poll() is None
    assert workers["b", "1000"].poll() is None


def test_the_first_in_a_place_replaces_nobody(workers: dict[tuple[str, str], subprocess.Popen[str]]) -> None:
    """Nothing is killed where nothing is named, and a process does not kill itself."""
    orphans.kill_predecessor({JOB: "a", WORKER: "1002"})
    orphans.kill_worker("1003", "a")
    wait_for("nothing", lambda: all(process.poll() is None for process in workers.values()), limit_s=1)
