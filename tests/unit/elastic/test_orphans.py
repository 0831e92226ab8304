"""Workers that the job has given up leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import psutil
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
    for other in (workers["a", "1001"], workers["b", "1000"]):
        other.terminate()
        assert other.wait(10) == -signal.SIGTERM, "what ends it is this signal, and nothing before it"


LEAVE_S = 1.0
LAST_COMMIT = """
import sys
from pathlib import Path
from hvd_train.run_files import durable
print("training", flush=True)
sys.stdin.readline()  # the end of its last step
with durable.writing(Path(sys.argv[1])) as file:
    print("writing", flush=True)
    sys.stdin.read()
    file.write(b"whole")
"""


def test_a_predecessor_that_commits_is_waited_for(tmp_path: Path) -> None:
    """A worker whose driver was out of reach has seconds to come to its last commit, and all it needs to write it."""
    path = tmp_path / "step-1.ckpt"
    old = subprocess.Popen(
        [sys.executable, "-c", LAST_COMMIT, str(path)],
        env={**os.environ, JOB: "a", WORKER: "1000"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    successor = threading.Thread(target=orphans.kill_predecessor, args=({JOB: "a", REPLACES: "1000"}, LEAVE_S))
    assert old.stdout is not None and old.stdin is not None
    assert old.stdout.readline() == "training\n"
    successor.start()
    old.stdin.write("\n")
    old.stdin.flush()
    assert old.stdout.readline() == "writing\n"
    successor.join(2 * LEAVE_S)  # longer than it would have had without a file to write
    assert successor.is_alive()
    old.communicate("")
    successor.join(5)
    assert not successor.is_alive()
    assert path.read_bytes() == b"whole"
    assert old.returncode in (0, -signal.SIGKILL)  # the file is there: its time is up, and it may not have ended yet


def test_a_predecessor_that_does_not_end_is_killed(workers: dict[tuple[str, str], subprocess.Popen[str]]) -> None:
    """One that runs but neither ends nor writes has its time, and no more."""
    begun = time.monotonic()
    orphans.kill_predecessor({JOB: "a", WORKER: "1002", REPLACES: "1000"}, 0.5)
    assert workers["a", "1000"].wait(10) == -signal.SIGKILL
    assert time.monotonic() - begun >= 0.5


def test_the_first_in_a_place_replaces_nobody(workers: dict[tuple[str, str], subprocess.Popen[str]]) -> None:
    """Nothing is killed where nothing is named, and a process does not kill itself."""
    orphans.kill_predecessor({JOB: "a", WORKER: "1002"})
    orphans.kill_worker("1003", "a")
    wait_for("nothing", lambda: all(process.poll() is None for process in workers.values()), limit_s=1)


def test_seconds_to_leave_and_minutes_to_write(tmp_path: Path) -> None:
    """A process that runs has so many seconds; one with an unfinished file has ten minutes, and no more."""
    this = psutil.Process()
    assert orphans._is_leaving(this, 4.9, 5.0)
    assert not orphans._is_leaving(this, 5.0, 5.0)
    with (tmp_path / "step-1.ckpt.partial").open("wb"):
        assert orphans._is_leaving(this, 599.9, 5.0)
        assert not orphans._is_leaving(this, 600.0, 5.0)
    assert not orphans._is_leaving(this, 599.9, 5.0)


def test_a_process_that_ends_by_itself_spares_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may do so at the moment when it is to be killed."""
    ended, other = Mock(), Mock()
    ended.kill.side_effect = psutil.NoSuchProcess(7)
    monkeypatch.setattr(orphans.processes, "started_with", lambda variables: [ended, other])
    orphans.kill_worker("1000", "a")
    other.kill.assert_called_once_with()
