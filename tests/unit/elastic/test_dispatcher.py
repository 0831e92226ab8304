"""An elastic job whose workers are threads: their environment, the driver's
answers, and how the job ends.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hvd_train.elastic.roster import Finish, Stage
from hvd_train.launch import workers
from hvd_train.launch.exit_report import ExitReport
from hvd_train.launch.workers import JOB, REPLACES, RUN_DIR, SLOT, WORKER
from tests.support.jobs import Job
from tests.support.launching import wait_for

NEVER_S = 1000.0


def limit(monkeypatch: pytest.MonkeyPatch, name: str, seconds: float) -> None:
    monkeypatch.setattr(f"hvd_train.elastic.{name}", seconds)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make limits unreachable on a slow machine, and waits short."""
    for name in ("SILENT_S", "SILENT_WHILE_REJOINING_S", "REPORT_S", "LEAVE_S"):
        limit(monkeypatch, f"roster.{name}", NEVER_S)
    limit(monkeypatch, "dispatcher._LAST_COMMIT_S", NEVER_S)
    limit(monkeypatch, "roster.BACK_OFF_S", 0.05)
    limit(monkeypatch, "dispatcher._QUIET_S", 0.01)
    limit(monkeypatch, "dispatcher._LOOK_S", 0.05)


@pytest.fixture
def two(patient: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    job = Job("ab")
    job.start()
    job.started.sort(key=lambda worker: worker.number)
    yield job
    limit(monkeypatch, "dispatcher._QUIET_S", 0.01)
    job.interrupted.set()
    job.end()


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    numbers = []
    monkeypatch.setattr(workers, "kill", lambda number, job: numbers.append(f"{number} of {job}"))
    return numbers


def numbers_of(job: Job) -> list[int]:
    return [worker.number for worker in job.started]


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


def trains(job: Job) -> list[int]:
    numbers = numbers_of(job)
    assert None not in job.ask(*numbers).values()
    return numbers


def test_a_worker_gets_its_place_and_its_job(patient: None) -> None:
    job = Job("aab")
    job.start()
    variables = sorted(job.variables.items())
    places = sorted(
        (its["HOROVOD_HOSTNAME"], its["HOROVOD_LOCAL_SIZE"], its[SLOT]) for _, its in variables
    )
    assert places == [("a", "2", "0"), ("a", "2", "1"), ("b", "1", "0")]
    for number, its in variables:
        assert its[WORKER] == str(number)
        assert (REPLACES in its, its[RUN_DIR]) == (False, "")
    assert len({its[JOB] for _, its in variables}) == 1
    job.interrupted.set()
    job.end()


def test_a_worker_that_ends_is_replaced(two: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """Its process may outlive its ssh; the next worker of the slot kills it."""
    first, second = trains(two)
    assert two.dispatcher.heartbeat_received(second) == "train"
    two.dispatcher.run_dir = "runs/mine"
    two.exit_codes[second] = 255
    wait_for("the successor", lambda: len(two.started) == 3)
    successor = two.variables[two.started[2].number]
    assert (successor[REPLACES], successor[RUN_DIR]) == (str(second), "runs/mine")
    assert (
        "worker b[0] ended with exit code 255 (a signal has killed it, or its ssh"
        in capsys.readouterr().err
    )
    assert two.dispatcher.heartbeat_received(second) == "end"
    assert two.dispatcher.wait_for_ranks(second) is None
    assert two.dispatcher.heartbeat_received(first) == "train"
    assert two.ask(first)[first] is not None


def test_an_error_is_printed_once(two: Job, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = numbers_of(two)
    for number in (first, second):
        error = f"Traceback:\n  File m.py, line 3\nNameError: typo in process {number}"
        two.dispatcher.exit_report_received(number, ExitReport(1, error))
    two.exit_codes |= {first: 1, second: 1}
    wait_for("successors", lambda: len(two.started) > 2)
    printed = capsys.readouterr().err
    assert printed.count("NameError") == 1
    assert "exit code" not in printed


def test_a_worker_that_reports_its_end_gets_no_rank(two: Job) -> None:
    """Horovod's core may still wait for a rank, and the process cannot
    end before the request does.
    """
    first, _ = numbers_of(two)
    with waits_for_rank(two, first):
        two.dispatcher.exit_report_received(first, ExitReport(3, "another rank cannot be reached"))


def test_an_evicted_worker_may_end_by_itself(
    two: Job, killed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its heartbeat is answered with `end`, it is not killed during a commit, and its
    exit code is not printed.
    """
    first, second = numbers_of(two)
    limit(monkeypatch, "dispatcher._QUIET_S", NEVER_S)
    two.dispatcher.heartbeat_received(second)
    two.deaf.add(second)
    two.hosts = "a"
    wait_for("its end", lambda: two.dispatcher.heartbeat_received(second) == "end")
    assert two.dispatcher.heartbeat_received(first) == "train"
    two.exit_codes[second] = 255
    wait_for("the end of its process", lambda: two.roster.worker(second) is None)
    assert killed == []
    assert (
        capsys.readouterr().err
        == "hvd-train: worker b[0] is evicted: its host is no longer listed\n"
    )


def test_a_silent_worker_is_killed(two: Job, killed: list[str]) -> None:
    """A stopped process would keep its GPU."""
    first, second = trains(two)
    two.roster.heartbeat_received(second, time.monotonic() - NEVER_S - 1)
    wait_for("its end", lambda: two.dispatcher.heartbeat_received(first) == "train" and killed)
    assert killed == [f"{second} of {two.variables[second][JOB]}"]


def test_after_a_signal_all_workers_stop(two: Job) -> None:
    first, second = numbers_of(two)
    with waits_for_rank(two, first):
        two.interrupted.set()
    assert [two.dispatcher.heartbeat_received(number) for number in (first, second)] == [
        "stop",
        "stop",
    ]
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
    first, second = trains(two)
    assert two.dispatcher.heartbeat_received(second) == "train"
    two.interrupted.set()
    two.exit_codes |= {first: 143, second: 255}
    over = threading.Event()
    threading.Thread(target=lambda: [two.wait_for_end(), over.set()], daemon=True).start()
    if hangs:
        wait_for("an end", lambda: two.dispatcher.heartbeat_received(second) == "end")
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
