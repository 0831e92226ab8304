"""horovodrun's own error says why a rank has failed: the functions that take the place of Horovod's."""

from __future__ import annotations

import inspect
import io
import sys
from typing import Any

import pytest
from horovod.runner import gloo_run, mpi_report
from horovod.runner.common.util import safe_shell_exec
from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.common.util.outcome import JobFailedError, worker_failed

from hvd_train.launch import watched
from hvd_train.launch.watched import _Job

NAMES = {
    safe_shell_exec: ("execute",),
    gloo_run: ("create_slot_env_vars", "worker_failed"),
    mpi_report: ("worker_failed", "MpirunReport", "Untagged"),
}


@pytest.fixture
def job() -> _Job:
    """A job whose ranks have not said anything."""
    return _Job()


@pytest.fixture(autouse=True)
def typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user has typed."""
    monkeypatch.setattr(sys, "argv", ["horovodrun", "-np", "2", "hvd-train", "train", "digits", "--log-dir", "logs"])


def run(job: _Job, index: int | None, says: str, exit_code: int) -> str:
    """Run a rank that prints this and ends so; return what has come to the console."""

    def execute(command: str, env: Any = None, stdout: Any = None, stderr: Any = None, index: Any = None) -> int:
        stderr.write(f"[{index}]<stderr>:{says}\n")
        stdout.flush()
        return exit_code

    console = io.StringIO()
    assert watched._keeping_lines(execute, job)("rank", stdout=console, stderr=console, index=index) == exit_code
    return console.getvalue()


def test_the_rank_that_failed_first_is_named_with_its_host_and_why(job: _Job) -> None:
    """Though rank 0, which has only lost it, has ended before; what they print is shown as before."""
    note = watched._noting_hosts(lambda slot: slot.rank, job)
    assert [note(SlotInfo(host, rank, 0, 0, 2, 1, 2)) for rank, host in enumerate(("h1", "h2"))] == [0, 1]
    assert run(job, 0, "hvd-train: another rank ended; the same command goes on from there", 3)
    assert run(job, 1, "last", 134) == "[1]<stderr>:last\n"
    assert run(job, None, "no rank", 255)
    assert run(job, 0, "late", 0)
    error = watched._in_words(worker_failed, job)("rank 0 on host h1", 3)
    assert isinstance(error, JobFailedError)
    assert error.exit_code == 134
    assert str(error).splitlines() == [
        "rank 1 on host h2 was killed by signal 6 (SIGABRT); the other ranks were stopped",
        "  why: native code has ended itself, as after a check that failed",
        "  it printed last: last",
        "  its whole output: in logs/rank-1.log on h2",
    ]


def test_what_is_no_rank_stays_as_it_is(job: _Job) -> None:
    """Where mpirun itself has failed, nobody knows which rank it was."""
    assert str(watched._in_words(worker_failed, job)("a rank (see above)", 1)).startswith("a rank (see above) ended ")


def test_ranks_of_mpi(job: _Job) -> None:
    """mpirun's lines have the rank in front; a notice of a guard says how a rank has ended, and may come twice."""
    shown: list[str] = []
    report = watched._report_of(job)(shown.append)
    report.feed("[1,0]<stderr>:from rank 0\n")
    report.feed("[1,1]<stderr>:<horovodrun: rank 1 ended 134>\n")
    report.feed("[1,0]<stderr>:<horovodrun: rank 0 ended 3>\n")
    report.feed("[1,1]<stderr>:<horovodrun: rank 1 ended 134>\n")
    untagged = watched._untagged_of(job)()
    assert untagged.feed(b"[1,1]<stdout>:from ra") + untagged.feed(b"nk 1\n[1,0]<stdout>:plain\n") == (
        b"[1,1]<stdout>:from rank 1\nplain\n"
    )
    assert shown == ["[1,0]<stderr>:from rank 0\n"]
    assert report.failure == (1, 134)
    assert [(end.rank, end.exit_code) for end in job.ends] == [(1, 134), (0, 3)]
    lines = str(watched._in_words(worker_failed, job)("rank 1 on host localhost", 134)).splitlines()
    assert lines[0] == "rank 1 on host localhost was killed by signal 6 (SIGABRT); the other ranks were stopped"
    assert lines[2] == "  it printed last: from rank 1"


def test_it_takes_the_places_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod's function has the parameters that ours passes on; a second call, as in a driver, does nothing."""
    parameters = list(inspect.signature(safe_shell_exec.execute).parameters)
    assert parameters[:5] == ["command", "env", "stdout", "stderr", "index"]
    for module, names in NAMES.items():
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))
    before = safe_shell_exec.execute
    watched.watch()
    first = safe_shell_exec.execute
    watched.watch()
    assert before is not first is safe_shell_exec.execute
