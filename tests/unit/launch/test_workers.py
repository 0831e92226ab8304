"""How a worker of an elastic job is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from subprocess import PIPE
from uuid import uuid4

import pytest

from hvd_train.launch import workers
from hvd_train.launch.workers import JOB, WORKER

FOREVER = [sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"]
# jobs that no other run of the tests has
OURS, OTHER = (f"{name}-{uuid4().hex}" for name in ("ours", "other"))


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    found = [
        subprocess.Popen(
            FOREVER, env={**os.environ, JOB: job, WORKER: number}, stdout=PIPE, text=True
        )
        for job, number in ((OURS, "1000"), (OURS, "1001"), (OTHER, "1000"))
    ]
    for process in found:
        assert process.stdout.readline() == "up\n"
    yield found
    for process in found:
        process.kill()
        process.communicate()


def test_only_that_worker_is_killed_after_the_grace_period(
    processes: list[subprocess.Popen[str]],
) -> None:
    old, *others = processes
    old.send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    workers.kill("1000", OURS, 0.5)
    assert old.wait(60) == -signal.SIGKILL
    assert time.monotonic() - begun >= 0.5
    for other in others:
        other.terminate()
        assert other.wait(60) == -signal.SIGTERM
