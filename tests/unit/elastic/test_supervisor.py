"""The supervisor: when it runs the command again, what each attempt gets, and how signals end it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_train.elastic import supervisor
from hvd_train.elastic.supervisor import FINAL, GRACE, STEADY_S, keep_going
from hvd_train.launch import child
from hvd_train.launch.launcher import CONTINUES, OWNER, SUPERVISOR

COMMAND = ["train", "--fast"]


class Attempts:
    """Simulate the attempts of a job, the process of the current attempt, and the clock."""

    def __init__(self) -> None:
        self.codes, self.received, self.starts = list[int](), list[int](), list[float]()
        self.started: list[tuple[Sequence[str], Mapping[str, Any]]] = []
        self.as_it_runs = lambda: None
        self.ran_s, self.tenths, self.runs = 0.0, 50_000, False  # the clock counts tenths of a second

    def monotonic(self) -> float:
        return self.tenths / 10

    def sleep(self, seconds: float) -> None:
        self.tenths += round(10 * seconds)

    @contextmanager
    def popen(self, command: Sequence[str], **options: Any) -> Iterator[Attempts]:
        self.started.append((command, options))
        self.starts.append(self.tenths / 10 - 5000)
        self.runs = True
        yield self

    def wait(self) -> int:
        self.as_it_runs()
        self.tenths += round(10 * self.ran_s)
        self.runs = False
        return self.codes.pop(0)

    def poll(self) -> int | None:
        return None if self.runs else 0

    def send_signal(self, number: int) -> None:
        self.received.append(number)


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Attempts]:
    made = Attempts()
    monkeypatch.setattr(supervisor, "time", made)
    monkeypatch.setattr(child, "time", made)
    monkeypatch.setattr(child, "subprocess", SimpleNamespace(Popen=made.popen))
    for name in (OWNER, CONTINUES, GRACE):
        monkeypatch.setenv(name, "")  # restored at the end
        monkeypatch.delenv(name)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_job_that_fails_repeatedly_ends(attempts: Attempts, capsys: pytest.CaptureFixture[str]) -> None:
    """The wait doubles with each failure; the last exit code counts."""
    attempts.codes = [7, -9, 1]
    assert keep_going(COMMAND, 2) == 1
    assert attempts.starts == [0, 2, 6]
    *_, again, last = capsys.readouterr().err.splitlines()
    assert again == "hvd-train: the job ended with exit code 137; it resumes from its last commit in 4 s"
    assert last == "hvd-train: the job has failed 3 times in a row, the last time with exit code 1"


def test_a_job_that_trains_for_minutes_between_faults_always_resumes(attempts: Attempts) -> None:
    attempts.ran_s, attempts.codes = STEADY_S, [1] * 20 + [0]
    assert keep_going(COMMAND, 1) == 0
    assert len(attempts.started) == 21


def test_a_final_exit_code_ends_the_job(attempts: Attempts) -> None:
    for code in FINAL:
        attempts.codes = [code]
        assert keep_going(COMMAND, 3) == code


def test_all_attempts_are_the_same_job(attempts: Attempts) -> None:
    attempts.codes = [1, 1, 0]
    assert keep_going(COMMAND, 3) == 0
    assert [command for command, _ in attempts.started] == [COMMAND] * 3
    environments = [options["env"] for _, options in attempts.started]
    (name,) = {environment[OWNER] for environment in environments}
    assert [environment.get(CONTINUES) for environment in environments] == [None, "1", "1"]
    assert {environment[SUPERVISOR] for environment in environments} == {str(os.getpid())}
    assert all(options["start_new_session"] for _, options in attempts.started)  # so Ctrl-C comes once
    attempts.codes = [0]
    keep_going(COMMAND, 3)
    assert attempts.started[-1][1]["env"][OWNER] != name, "another job must not take over the run folder"


@pytest.mark.parametrize(("sent", "received"), [("USR1", "TERM"), ("HUP HUP HUP", "TERM"), ("INT INT", "INT INT")])
def test_a_signal_reaches_the_command_and_no_attempt_follows(attempts: Attempts, sent: str, received: str) -> None:
    """A second signal reaches it too, unless it is another SIGHUP of a lost terminal."""
    attempts.codes = [1, 0]
    attempts.as_it_runs = lambda: [signal.raise_signal(signal.Signals[f"SIG{name}"]) for name in sent.split()]
    assert keep_going(COMMAND, 3) == 1
    assert [f"SIG{name}" for name in received.split()] == [signal.Signals(number).name for number in attempts.received]
    assert len(attempts.started) == 1


def test_under_nohup_sighup_is_ignored_and_ctrl_c_is_not(attempts: Attempts) -> None:
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    attempts.codes = [1]
    attempts.as_it_runs = lambda: [signal.raise_signal(number) for number in (signal.SIGHUP, signal.SIGINT)]
    assert keep_going(COMMAND, 3) == 1
    assert attempts.received == [signal.SIGINT]
