"""A new worker clears away the process that had its slot before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest

from hvd_train.elastic import orphans
from hvd_train.launch.launcher import JOB, REPLACES, WORKER

FOREVER = [sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"]
Workers = dict[tuple[str, str], subprocess.Popen[str]]


@pytest.fixture
def jobs() -> tuple[str, str]:
    """Names of two jobs that no other run of the tests on this machine has."""
    return f"a-{uuid4().hex}", f"b-{uuid4().hex}"


@pytest.fixture
def workers(jobs: tuple[str, str]) -> Iterator[Workers]:
    """Running processes by job and worker number."""
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


def test_a_stopped_predecessor_is_killed_and_no_other_worker(jobs: tuple[str, str], workers: Workers) -> None:
    """A new worker kills the stopped process that had its slot; other workers and other jobs live."""
    old = workers[jobs[0], "1000"]
    old.send_signal(signal.SIGSTOP)
    orphans.kill_predecessor({JOB: jobs[0], WORKER: "1002", REPLACES: "1000"})
    assert old.wait(60) == -signal.SIGKILL
    for other in (workers[jobs[0], "1001"], workers[jobs[1], "1000"]):
        other.terminate()
        assert other.wait(60) == -signal.SIGTERM, "what ends it is this signal, and nothing before it"


def test_a_running_predecessor_is_killed_after_the_grace_period(jobs: tuple[str, str], workers: Workers) -> None:
    """A process that neither exits nor writes is killed, but not before its grace period is over."""
    begun = time.monotonic()
    orphans.kill_predecessor({JOB: jobs[0], WORKER: "1002", REPLACES: "1000"}, 0.5)
    assert workers[jobs[0], "1000"].wait(60) == -signal.SIGKILL
    assert time.monotonic() - begun >= 0.5


def test_the_first_worker_of_a_slot_kills_nothing(jobs: tuple[str, str], workers: Workers) -> None:
    """Without a predecessor nothing is killed."""
    orphans.kill_predecessor({JOB: jobs[0], WORKER: "1002"})
    orphans.kill_worker("1003", jobs[0])
    for process in workers.values():
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM


LAST_COMMIT = """
import sys
from pathlib import Path
from hvd_train.run_files import durable
with durable.writing(Path(sys.argv[1])) as file:
    print("writing", flush=True)
    sys.stdin.readline()
    file.write(b"whole")
print("written", flush=True)
sys.stdin.readline()
"""


def test_the_grace_period_starts_again_after_a_write(
    jobs: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker has all the time it needs for its last commit, and then the whole grace period to exit."""
    path = tmp_path / "step-1.ckpt"
    old = subprocess.Popen(
        [sys.executable, "-c", LAST_COMMIT, str(path)],
        env={**os.environ, JOB: jobs[0], WORKER: "1000"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert old.stdout is not None and old.stdin is not None
    assert old.stdout.readline() == "writing\n"
    clock = SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s, sleep=lambda _: next(between_polls))

    def worker() -> Iterator[None]:
        clock.now_s += 100.0  # it writes for longer than the grace period
        yield
        old.stdin.write("\n")
        old.stdin.flush()
        assert old.stdout.readline() == "written\n"
        yield
        clock.now_s += 4.0  # less than the grace period since it was last seen writing
        yield
        assert old.poll() is None
        old.communicate("\n", timeout=60)
        yield

    between_polls = worker()
    monkeypatch.setattr(orphans, "time", clock)
    orphans.kill_predecessor({JOB: jobs[0], REPLACES: "1000"}, 5.0)
    assert (old.returncode, path.read_bytes()) == (0, b"whole")
