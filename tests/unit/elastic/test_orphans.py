"""A new worker kills the earlier process of its slot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from uuid import uuid4

import pytest

from hvd_train.elastic import orphans
from hvd_train.launch.launcher import JOB, REPLACES, WORKER

FOREVER = [sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"]
Workers = dict[tuple[str, str], subprocess.Popen[str]]


@pytest.fixture
def jobs() -> tuple[str, str]:
    return f"a-{uuid4().hex}", f"b-{uuid4().hex}"


@pytest.fixture
def workers(jobs: tuple[str, str]) -> Iterator[Workers]:
    found = {}
    for job, number in ((jobs[0], "1000"), (jobs[0], "1001"), (jobs[1], "1000")):
        environment = {**os.environ, JOB: job, WORKER: number}
        found[job, number] = subprocess.Popen(FOREVER, env=environment, stdout=subprocess.PIPE, text=True)
    for process in found.values():
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
    yield found
    for process in found.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("stopped", [True, False])
def test_only_a_predecessor_is_killed_after_some_time(stopped: bool, jobs: tuple[str, str], workers: Workers) -> None:
    old = workers[jobs[0], "1000"]
    if stopped:
        old.send_signal(signal.SIGSTOP)
    orphans.kill_predecessor({JOB: jobs[0], WORKER: "1002"})  # the first worker of its slot
    orphans.kill_worker("1003", jobs[0])
    assert old.poll() is None
    begun = time.monotonic()
    orphans.kill_predecessor({JOB: jobs[0], WORKER: "1002", REPLACES: "1000"}, 0.5)
    assert old.wait(60) == -signal.SIGKILL
    assert time.monotonic() - begun >= 0.5
    for other in (workers[jobs[0], "1001"], workers[jobs[1], "1000"]):
        other.terminate()
        assert other.wait(60) == -signal.SIGTERM
