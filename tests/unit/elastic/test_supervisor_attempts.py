"""One attempt after another, with commands that take no time: what each is given, how long until the next, who ends it.

The commands of test_supervisor.py are processes; here their ends, and the clock, are the test's.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_train.elastic import supervisor
from hvd_train.elastic.roster import TOO_FEW_WORKERS
from hvd_train.elastic.supervisor import FINAL, STEADY_S, keep_going
from hvd_train.launch.launcher import GOES_ON, GRACE, OWNER, STARTED, SUPERVISOR

COMMAND = ["train", "--fast"]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@dataclass
class Attempts:
    """The attempts of a job, each of which ends when it is waited for."""

    codes: list[int] = field(default_factory=list)
    """The exit codes with which the attempts end, as Popen returns them."""
    ran_s: float = 0.0
    """How long each attempt runs."""
    as_it_starts: Callable[[], object] = lambda: None
    as_it_runs: Callable[[], object] = lambda: None
    as_it_sleeps: Callable[[], object] = lambda: None
    tenths: int = 50_000
    """The time, in tenths of a second."""
    asked: int = 0
    """How often the time was asked for."""
    started: list[tuple[Sequence[str], Mapping[str, Any], float]] = field(default_factory=list)
    """The command of each attempt, its other arguments, and when it started."""
    heard: list[int] = field(default_factory=list)
    """The signals that were passed on."""

    def monotonic(self) -> float:
        """The seconds on the test's clock."""
        self.asked += 1
        assert self.asked < 10_000, "it waits for ever"
        return self.tenths / 10

    def sleep(self, seconds: float) -> None:
        """The time goes on."""
        self.as_it_sleeps()
        self.tenths += round(10 * seconds)

    def popen(self, command: Sequence[str], **options: Any) -> Attempt:
        """The next attempt starts."""
        self.as_it_starts()
        self.started.append((command, options, self.tenths / 10))
        return Attempt(self, self.codes.pop(0))

    def starts(self) -> list[float]:
        """When the attempts started, in seconds since the first one."""
        return [at - self.started[0][2] for _, _, at in self.started]


@dataclass
class Attempt:
    """The process of one attempt."""

    attempts: Attempts
    code: int
    has_ended: bool = False

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.has_ended

    def wait(self) -> int:
        """It runs, and ends."""
        self.attempts.as_it_runs()
        self.attempts.tenths += round(10 * self.attempts.ran_s)
        self.has_ended = True
        return self.code

    def poll(self) -> int | None:
        """Its exit code once it has ended."""
        return self.code if self.has_ended else None

    def send_signal(self, number: int) -> None:
        """A signal comes to it."""
        self.attempts.heard.append(number)


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Attempts]:
    """Attempts that are yet to be given their ends; the signals of this process are as before afterwards."""
    made = Attempts()
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=made.monotonic, sleep=made.sleep))
    monkeypatch.setattr(supervisor, "subprocess", SimpleNamespace(Popen=made.popen))
    for name in (STARTED, OWNER, GOES_ON, GRACE):
        monkeypatch.setenv(name, "")  # so that it is as before at the end
        monkeypatch.delenv(name)
    missed: list[int] = []
    before = {number: signal.signal(number, lambda number, _: missed.append(number)) for number in SIGNALS}
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)
    assert not missed, "the supervisor has not heard of these"


def test_each_attempt_comes_later_than_the_one_before(attempts: Attempts, capsys: pytest.CaptureFixture[str]) -> None:
    """After 2 s, then 4 s, and so on; the user reads it, and at last how often it was."""
    attempts.codes = [7, -9, 1]
    assert keep_going(COMMAND, 2) == 1
    assert attempts.starts() == [0, 2, 6]
    assert capsys.readouterr().err.splitlines() == [
        "hvd-train: the job ended with exit code 7; it goes on from its last commit in 2 s",
        "hvd-train: the job ended with exit code 137; it goes on from its last commit in 4 s",
        "hvd-train: the job has failed 3 times in a row, the last time with exit code 1",
    ]


def test_attempts_that_last_are_made_again_and_again(attempts: Attempts) -> None:
    """A job that trains for minutes between its faults has as many attempts as it needs."""
    attempts.ran_s, attempts.codes = STEADY_S, [1] * 20 + [0]
    assert keep_going(COMMAND, 1) == 0
    assert len(attempts.started) == 21


def test_attempts_that_wait_for_workers_in_vain_are_numbered(attempts: Attempts) -> None:
    """They last long, but nobody has trained in them."""
    attempts.ran_s, attempts.codes = 2 * STEADY_S, [TOO_FEW_WORKERS] * 5
    assert keep_going(COMMAND, 1) == TOO_FEW_WORKERS
    assert len(attempts.started) == 2


@pytest.mark.parametrize("code", FINAL)
def test_an_end_for_good_is_not_spoken_of(attempts: Attempts, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The command has said all that there is to say."""
    attempts.codes = [code]
    assert keep_going(COMMAND, 3) == code
    assert capsys.readouterr().err == ""


def test_all_attempts_are_the_same_job(attempts: Attempts) -> None:
    """By its age and by its name; all but the first are told that they go on, and all know their supervisor."""
    attempts.codes = [1, 1, 0]
    assert keep_going(COMMAND, 3) == 0
    commands, options, _ = zip(*attempts.started, strict=True)
    assert commands == (COMMAND,) * 3
    environments = [given["env"] for given in options]
    assert {environment[STARTED] for environment in environments} == {"5000.0"}
    (name,) = {environment[OWNER] for environment in environments}
    assert len(name) == 32
    assert [environment.get(GOES_ON) for environment in environments] == [None, "1", "1"]
    assert {environment[SUPERVISOR] for environment in environments} == {str(os.getpid())}
    assert {environment["PATH"] for environment in environments} == {os.environ["PATH"]}
    assert all(given["start_new_session"] is True for given in options), "a terminal's Ctrl-C is passed on once"


def test_two_jobs_have_different_names(attempts: Attempts) -> None:
    """Neither may take over the run folder of the other."""
    attempts.codes = [0, 0]
    for _ in range(2):
        keep_going(COMMAND, 3)
    first, second = (options["env"][OWNER] for _, options, _ in attempts.started)
    assert first != second


@pytest.mark.parametrize(("users", "given"), [(None, "30"), ("90", "90")])
def test_a_launcher_gives_workers_the_time_to_commit(
    attempts: Attempts, users: str | None, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a minute, or what the user says."""
    if users:
        monkeypatch.setenv(GRACE, users)
    attempts.codes = [0]
    keep_going(COMMAND, 3)
    assert attempts.started[0][1]["env"][GRACE] == given


@pytest.mark.parametrize(
    ("sent", "heard"),
    [
        ("TERM", "TERM"),
        ("INT", "INT"),
        ("USR1", "TERM"),
        ("HUP", "TERM"),
        ("HUP HUP HUP", "TERM"),
        ("TERM HUP", "TERM"),
        ("HUP TERM", "TERM TERM"),
        ("TERM TERM", "TERM TERM"),
        ("INT INT", "INT INT"),
    ],
)
def test_a_signal_comes_to_the_command_as_one_that_it_knows(attempts: Attempts, sent: str, heard: str) -> None:
    """A second one as well, which hurries it, unless it is that of a terminal that is gone; no attempt follows."""

    def numbers(names: str) -> list[int]:
        return [signal.Signals[f"SIG{name}"] for name in names.split()]

    attempts.codes = [1, 0]
    attempts.as_it_runs = lambda: [signal.raise_signal(number) for number in numbers(sent)]
    assert keep_going(COMMAND, 3) == 1
    assert attempts.heard == numbers(heard)
    assert len(attempts.started) == 1


def test_a_signal_while_the_command_starts_comes_to_it(attempts: Attempts) -> None:
    """Nobody else would stop it; it hears of it once."""
    attempts.codes = [143]
    attempts.as_it_starts = lambda: signal.raise_signal(signal.SIGHUP)
    assert keep_going(COMMAND, 3) == 143
    assert attempts.heard == [signal.SIGTERM]

    attempts.codes, attempts.heard = [7, 130], []
    ends = iter([signal.SIGINT])
    attempts.as_it_starts = lambda: len(attempts.started) == 2 and signal.raise_signal(next(ends))
    assert keep_going(COMMAND, 3) == 130
    assert attempts.heard == [signal.SIGINT], "it is not the one before, whose process has ended"


def test_a_signal_while_nothing_runs_comes_to_nobody(attempts: Attempts) -> None:
    """The command that has ended has no process any more; there is no other attempt, and no wait for it."""
    attempts.codes = [7, 0]
    attempts.as_it_sleeps = lambda: signal.raise_signal(signal.SIGTERM)
    assert keep_going(COMMAND, 3) == 7
    assert (len(attempts.started), attempts.heard) == (1, [])
    assert attempts.tenths == 50_001


def test_under_nohup_a_terminal_that_is_gone_is_no_signal(attempts: Attempts) -> None:
    """The user wants the job to go on; a Ctrl-C that a shell has turned off in its background is still heard."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    attempts.codes = [1, 1, 0]
    attempts.as_it_runs = lambda: signal.raise_signal(signal.SIGHUP)
    assert keep_going(COMMAND, 3) == 0
    attempts.codes = [1]
    attempts.as_it_runs = lambda: signal.raise_signal(signal.SIGINT)
    assert keep_going(COMMAND, 3) == 1
    assert attempts.heard == [signal.SIGINT]


def test_a_wait_that_no_signal_ends_is_a_whole_one(attempts: Attempts) -> None:
    """Whoever waits hears which it was."""
    signals = supervisor._Signals()
    assert signals.wait(1.5) is False
    assert attempts.tenths == 50_015
    signal.raise_signal(signal.SIGUSR1)
    assert signals.wait(1.5) is True
    assert attempts.tenths == 50_015


@pytest.fixture
def kept_going(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What `main` has done, which ends with exit code 7."""
    done: list[object] = []
    monkeypatch.setattr(supervisor, "outlive", lambda: done.append("outlives its console"))
    monkeypatch.setattr(supervisor, "keep_going", lambda *arguments: done.append(arguments) or 7)
    return done


@pytest.mark.parametrize(("flags", "restarts"), [([], 10), (["--restarts", "3"], 3)])
def test_the_command_line_is_the_command_with_a_limit_of_attempts(
    kept_going: list[object], flags: list[str], restarts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten, unless the user gives another; flags after -- are the command's; the exit code is that of the job."""
    monkeypatch.setattr(sys, "argv", ["supervisor.py", *flags, "--", "train", "--restarts", "5"])
    with pytest.raises(SystemExit) as ended:
        supervisor.main()
    assert ended.value.code == 7
    assert kept_going == ["outlives its console", (["train", "--restarts", "5"], restarts)]


def test_without_a_command_there_is_nothing_to_keep_going(
    kept_going: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user reads what to type, and has the exit code of wrong input."""
    monkeypatch.setattr(sys, "argv", ["supervisor.py", "--restarts", "3"])
    with pytest.raises(SystemExit) as ended:
        supervisor.main()
    assert ended.value.code == 2
    assert "usage: python -m hvd_train.elastic.supervisor [-h] [--restarts RESTARTS]" in capsys.readouterr().err
    assert len(kept_going) == 1


def test_help_says_what_it_does_and_takes(
    kept_going: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the number of attempts that it makes."""
    monkeypatch.setattr(sys, "argv", ["supervisor.py", "--help"])
    with pytest.raises(SystemExit):
        supervisor.main()
    printed = " ".join(capsys.readouterr().out.split())
    assert "Keeps a job going when its launcher dies" in printed
    assert "attempts that may fail in a row (default: 10)" in printed
    assert "command what to keep going, after --" in printed
