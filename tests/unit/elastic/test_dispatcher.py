"""An elastic job whose workers are threads: their environment, the driver's
answers, and how the job ends.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import Mock

import pytest

from hvd_train.elastic.roster import Finish, Stage
from hvd_train.launch import workers
from hvd_train.launch.exit_report import ExitReport
from hvd_train.launch.workers import JOB, REPLACES, RUN_DIR, SLOT, WORKER
from tests.support.jobs import ONE, TWO, Job
from tests.support.launching import wait_for

NEVER_S = 1000.0


def limit(monkeypatch: pytest.MonkeyPatch, name: str, seconds: float) -> None:
    monkeypatch.setattr(f"hvd_train.elastic.{name}", seconds)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make limits unreachable on a slow machine, and waits short."""
    for name, seconds in {
        "roster.SILENT_S": NEVER_S,
        "roster.SILENT_WHILE_REJOINING_S": NEVER_S,
        "roster.REPORT_S": NEVER_S,
        "roster.LEAVE_S": NEVER_S,
        "roster.BACK_OFF_S": 0.05,
        "dispatcher._LAST_COMMIT_S": NEVER_S,
        "dispatcher._QUIET_S": 0.01,
        "dispatcher._LOOK_S": 0.05,
    }.items():
        limit(monkeypatch, name, seconds)


@pytest.fixture
def two(patient: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    job = Job("ab")
    job.start()
    yield job
    limit(monkeypatch, "dispatcher._QUIET_S", 0.01)
    job.interrupted.set()
    job.end()


@pytest.fixture
def kill(monkeypatch: pytest.MonkeyPatch) -> Mock:
    kill = Mock()
    monkeypatch.setattr(workers, "kill", kill)
    return kill


@contextmanager
def waits_for_rank(job: Job, number: int) -> Iterator[None]:
    """Let this worker wait for a rank during the block, and get an answer at its end."""
    asking = threading.Thread(target=job.ask, args=(number,), daemon=True)
    asking.start()
    wait_for(
        "the request", lambda: job.roster.worker(number).stage in (Stage.READY, Stage.REJOINING)
    )
    yield
    asking.join(60)
    assert not asking.is_alive()


def trains(job: Job) -> None:
    assert None not in job.ask(ONE, TWO).values()


def test_a_worker_gets_its_place_and_its_job(patient: None) -> None:
    job = Job("aab")
    job.start()
    each = [its for _, its in sorted(job.variables.items())]
    names = ("HOROVOD_HOSTNAME", "HOROVOD_LOCAL_SIZE", SLOT, WORKER, RUN_DIR)
    assert ["-".join(map(its.get, names)) for its in each] == [
        "a-2-0-1000-",
        "a-2-1-1001-",
        "b-1-0-1002-",
    ]
    assert len({its[JOB] for its in each}) == 1
    assert not any(REPLACES in its for its in each)
    job.interrupted.set()
    job.end()


def test_a_worker_that_ends_is_replaced(two: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """Its process may outlive its ssh; the next worker of the slot kills it."""
    trains(two)
    assert two.dispatcher.heartbeat_received(TWO) == "train"
    two.dispatcher.run_dir = "runs/mine"
    two.exit_codes[TWO] = 255
    wait_for("the successor", lambda: len(two.started) == 3)
    successor = two.variables[two.started[2].number]
    assert (successor[REPLACES], successor[RUN_DIR]) == (str(TWO), "runs/mine")
    line = "worker b[0] ended with exit code 255 (a signal has killed it, or its ssh"
    assert line in capsys.readouterr().err
    assert two.dispatcher.heartbeat_received(TWO) == "end"
    assert two.dispatcher.wait_for_ranks(TWO) is None
    assert two.dispatcher.heartbeat_received(ONE) == "train"
    assert two.ask(ONE)[ONE] is not None


def test_an_error_is_printed_once(two: Job, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (ONE, TWO):
        error = f"Traceback:\n  File m.py, line 3\nNameError: typo in process {number}"
        two.dispatcher.exit_report_received(number, ExitReport(1, error))
        two.exit_codes[number] = 1
    wait_for("successors", lambda: len(two.started) > 2)
    printed = capsys.readouterr().err
    assert printed.count("NameError") == 1
    assert "exit code" not in printed


def test_a_worker_that_reports_its_end_gets_no_rank(two: Job) -> None:
    """Horovod's core may still wait for a rank, and the process cannot
    end before the request does.
    """
    with waits_for_rank(two, ONE):
        two.dispatcher.exit_report_received(ONE, ExitReport(3, "another rank cannot be reached"))


def test_an_evicted_worker_may_end_by_itself(
    two: Job, kill: Mock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its heartbeat is answered with `end`, it is not killed during a commit, and its
    exit code is not printed.
    """
    limit(monkeypatch, "dispatcher._QUIET_S", NEVER_S)
    two.dispatcher.heartbeat_received(TWO)
    two.deaf.add(TWO)
    two.hosts = "a"
    wait_for("its end", lambda: two.dispatcher.heartbeat_received(TWO) == "end")
    assert two.dispatcher.heartbeat_received(ONE) == "train"
    two.exit_codes[TWO] = 255
    wait_for("the end of its process", lambda: two.roster.worker(TWO) is None)
    assert not kill.called
    assert (
        capsys.readouterr().err
        == "hvd-train: worker b[0] is evicted: its host is no longer listed\n"
    )


def test_a_silent_worker_is_killed(two: Job, kill: Mock) -> None:
    """A stopped process would keep its GPU."""
    trains(two)
    two.roster.heartbeat_received(TWO, time.monotonic() - NEVER_S - 1)
    wait_for("its end", lambda: two.dispatcher.heartbeat_received(ONE) == "train" and kill.called)
    kill.assert_called_once_with(str(TWO), two.variables[TWO][JOB])


def test_after_a_signal_all_workers_stop(two: Job) -> None:
    with waits_for_rank(two, ONE):
        two.interrupted.set()
    for number in (ONE, TWO):
        assert two.dispatcher.heartbeat_received(number) == "stop"
    assert two.end() == Finish(1, "stopped")


@pytest.mark.parametrize("hangs", [False, True])
def test_after_a_signal_the_job_waits_for_other_hosts(
    hangs: bool, two: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their ssh ends with the signal; workers there send heartbeats while
    they write, but not for ever.
    """
    limit(monkeypatch, "dispatcher._QUIET_S", NEVER_S)
    if hangs:
        limit(monkeypatch, "dispatcher._LAST_COMMIT_S", 0.3)
    trains(two)
    assert two.dispatcher.heartbeat_received(TWO) == "train"
    two.interrupted.set()
    two.exit_codes |= {ONE: 143, TWO: 255}
    over = threading.Event()
    threading.Thread(target=lambda: [two.wait_for_end(), over.set()], daemon=True).start()
    if hangs:
        wait_for("an end", lambda: two.dispatcher.heartbeat_received(TWO) == "end")
    else:
        assert not over.wait(0.3)
    limit(monkeypatch, "dispatcher._QUIET_S", 0.01)
    assert over.wait(60)


def test_after_a_failure_the_last_list_is_used(
    two: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    two.hosts = ValueError("no such file")
    looks = two.looks
    wait_for("failures", lambda: two.looks > looks + 2)
    two.hosts = "abb"
    wait_for("a third worker", lambda: len(two.started) == 3)
    assert (
        capsys.readouterr().err == "hvd-train: hosts: no such file; the last list stays in force\n"
    )
