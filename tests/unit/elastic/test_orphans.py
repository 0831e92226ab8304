"""A new worker kills the earlier process of its slot."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from uuid import uuid4

import pytest

from hvd_train.launch import launcher
from hvd_train.launch.launcher import JOB, REPLACES, WORKER

FOREVER = [sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"]
OURS, OTHER = (f"{name}-{uuid4().hex}" for name in ("ours", "other"))  # jobs that no other run of the tests has


@pytest.fixture
def workers() -> Iterator[dict[tuple[str, str], subprocess.Popen[str]]]:
    found = {}
    for job, number in ((OURS, "1000"), (OURS, "1001"), (OTHER, "1000")):
        environment = {**os.environ, JOB: job, WORKER: number}
        found[job, number] = subprocess.Popen(FOREVER, env=environment, stdout=subprocess.PIPE, text=True)
    for process in found.values():
        assert process.stdout is not None and process.stdout.readline() == "up\n"
    yield found
    for process in found.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("stopped", [True, False])
def test_only_the_predecessor_is_killed_after_the_grace_period(
    stopped: bool, workers: dict[tuple[str, str], subprocess.Popen[str]]
) -> None:
    old = workers[OURS, "1000"]
    if stopped:
        old.send_signal(signal.SIGSTOP)
    launcher.kill_predecessor({JOB: OURS, WORKER: "1002"})  # the first worker of its slot
    launcher.kill_worker("1003", OURS)
    assert old.poll() is None
    begun = time.monotonic()
    launcher.kill_predecessor({JOB: OURS, WORKER: "1002", REPLACES: "1000"}, 0.5)
    assert old.wait(60) == -signal.SIGKILL
    assert time.monotonic() - begun >= 0.5
    for other in (workers[OURS, "1001"], workers[OTHER, "1000"]):
        other.terminate()
        assert other.wait(60) == -signal.SIGTERM
