"""How the workers of a job end, and the job: by signals, by an ssh that fails, by what they have said before."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable

import pytest

from hvd_train.elastic.dispatcher import _LAST_COMMIT_S
from hvd_train.elastic.roster import Finish
from hvd_train.launch.last_word import LastWord
from hvd_train.launch.launcher import REPLACES, SUPERVISOR
from tests.support.dispatched import Job
from tests.support.launching import wait_for


def test_after_a_signal_all_are_told_to_stop(two: Job) -> None:
    """The job is over when the processes have ended and no heartbeat comes any more."""
    numbers = [ranks.worker for ranks in two.started]
    two.ask(*numbers)
    two.interrupted.set()
    assert [two.dispatcher.heartbeat_received(number) for number in numbers] == ["stop", "stop"]
    assert two.end() == Finish(1, "stopped")


def beats_until_told(two: Job, worker: int, capsys: pytest.CaptureFixture[str]) -> str:
    """Let a worker whose ssh has failed beat until the user is told that it stays, and return what was printed."""
    printed = [""]

    def told() -> bool:
        assert two.dispatcher.heartbeat_received(worker) == "train"
        printed[0] += capsys.readouterr().err
        return "its heartbeats still come" in printed[0]

    wait_for("a word about it", told)
    return printed[0]


def test_a_worker_whose_ssh_has_failed_stays_while_its_heart_beats(
    two: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its driver's network may have been away; only when it is silent it is gone, and its slot gets another worker."""
    first, second = sorted(ranks.worker for ranks in two.started)
    two.ask(first, second)
    two.dispatcher.heartbeat_received(second)
    two.exit_codes[second] = 255
    printed = beats_until_told(two, second, capsys)
    assert two.dispatcher.heartbeat_received(second) == "train"
    printed += capsys.readouterr().err  # it is said once
    assert printed.count("the ssh to worker b[0] has failed; its heartbeats still come") == 1
    assert two.dispatcher.may_ask(second) == "ask"
    monkeypatch.setattr("hvd_train.elastic.dispatcher.SILENT_S", 0.1)
    wait_for("its successor", lambda: len(two.started) == 3)
    assert "worker b[0] ended with exit code 255" in capsys.readouterr().err
    assert two.started[2].environment[REPLACES] == str(second)
    assert two.dispatcher.heartbeat_received(second) == "end"


@pytest.mark.parametrize("cut_first", [False, True])
def test_a_worker_whose_ssh_and_lifeline_are_gone_is_dead_at_once(
    two: Job, cut_first: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others need not wait for its silence; a heartbeat after the cut would prove that it lives."""
    for limit in ("dispatcher.SILENT_S", "roster.SILENT_S", "roster.SILENT_WHILE_MEETING_S"):
        monkeypatch.setattr(f"hvd_train.elastic.{limit}", 1000.0)
    first, second = sorted(ranks.worker for ranks in two.started)
    two.ask(first, second)
    theirs, ours = socket.socketpair()
    two.dispatcher.lifeline_opened(second, ours)
    two.dispatcher.heartbeat_received(second)
    if not cut_first:
        two.exit_codes[second] = 255
    theirs.sendall(b"what is sent counts for nothing")
    theirs.close()
    if cut_first:
        wait_for("the cut", lambda: two.dispatcher._processes[second].cut_at)
        two.exit_codes[second] = 255
    assert two.ask(first)[first] is not None
    assert "its heartbeats still come" not in capsys.readouterr().err


def test_the_last_word_of_a_worker_whose_ssh_has_failed_is_its_exit_code(
    two: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before or after the ssh fails: a job that is done is not started again."""
    first, second = sorted(ranks.worker for ranks in two.started)
    two.ask(first, second)
    for number in (first, second):
        two.dispatcher.heartbeat_received(number)
    two.dispatcher.last_word_received(first, LastWord(0))
    two.exit_codes[first] = two.exit_codes[second] = 255
    two.dispatcher.last_word_received(second, LastWord(0))
    assert two.end() == Finish(0, "done")
    assert "exit code" not in capsys.readouterr().err
    two.dispatcher.last_word_received(first, LastWord(1))  # of nobody any more


def test_an_ssh_that_fails_before_the_first_heartbeat_is_a_failed_start(
    two: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    """The host may be unreachable; the next attempt comes in its time."""
    number = two.started[0].worker
    two.exit_codes[number] = 255
    wait_for("the next attempt", lambda: len(two.started) == 3)
    assert "ended with exit code 255" in capsys.readouterr().err


def test_a_job_that_is_over_waits_for_a_followed_worker_until_it_is_silent(
    two: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not for as long as for one that trains; meanwhile it is told to end."""
    first, second = sorted(ranks.worker for ranks in two.started)
    two.ask(first, second)
    two.dispatcher.heartbeat_received(second)
    two.exit_codes[second] = 255
    monkeypatch.setattr("hvd_train.elastic.dispatcher.SILENT_S", 1000.0)
    two.interrupted.set()
    assert two.dispatcher.heartbeat_received(second) == "stop"
    assert two.end() == Finish(1, "stopped")


def test_a_signal_to_one_worker_is_a_change_and_to_all_a_stop(
    two: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one that leaves gets no rank, and has the time for its last commit before it is ended."""
    timers, timer = dict[threading.Timer, float](), threading.Timer

    def noted(seconds: float, function: Callable[[], None]) -> threading.Timer:
        made = timer(seconds, function)
        timers[made] = seconds
        return made

    monkeypatch.setattr(threading, "Timer", noted)
    first, second = sorted(ranks.worker for ranks in two.started)
    two.ask(first, second)
    assert two.dispatcher.told_to_end(second) == "change"
    assert two.dispatcher.heartbeat_received(first) == "change"
    assert two.ask(second) == {second: None}
    ((timer_of_it, seconds),) = timers.items()
    assert (timer_of_it.daemon, seconds) == (True, _LAST_COMMIT_S), "nor does the launcher wait for it at its own end"
    assert "worker b[0] is taken out: it was told to end by a signal" in capsys.readouterr().err
    two.exit_codes[second] = 143
    assert two.ask(first)[first] is not None
    assert two.dispatcher.told_to_end(first) == "stop"
    two.exit_codes[first] = 143
    assert two.end() == Finish(143, "stopped, and committed")


@pytest.mark.parametrize("lives", [True, False])
def test_a_job_without_its_supervisor_stops(lives: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a signal, once: nobody would start it again, or take its exit code."""
    signals: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda process, number: signals.append((process, number)))
    monkeypatch.setenv(SUPERVISOR, str(os.getppid() if lives else os.getpid()))
    job = Job({"a": 1})
    job.start()
    job.ask(job.started[0].worker)
    assert job.end() == Finish(0, "done")
    assert signals == ([] if lives else [(os.getpid(), signal.SIGTERM)])


@pytest.mark.parametrize("ends", ["silence", "the limit"])
def test_after_a_signal_the_job_waits_for_commits_on_other_hosts(
    two: Job, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ssh to them has ended with the signal; they beat as long as they write, and nobody waits for ever."""
    monkeypatch.setattr("hvd_train.elastic.dispatcher._QUIET_S", 1000.0)
    numbers = [ranks.worker for ranks in two.started]
    two.ask(*numbers)
    assert two.dispatcher.heartbeat_received(numbers[1]) == "train"
    if ends == "the limit":
        monkeypatch.setattr("hvd_train.elastic.dispatcher._LAST_COMMIT_S", 0.5)
    two.interrupted.set()
    two.exit_codes |= dict.fromkeys(numbers, 143)
    over = threading.Event()
    threading.Thread(target=lambda: [two.dispatcher.wait_for_end(), over.set()], daemon=True).start()
    assert not over.wait(0.3)
    if ends == "silence":
        monkeypatch.setattr("hvd_train.elastic.dispatcher._QUIET_S", 0.01)
    assert over.wait(20)


def test_a_worker_that_hangs_after_a_signal_is_told_to_end(two: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """It beats for ever, and its ssh has failed: the launcher must not wait for it for ever."""
    monkeypatch.setattr("hvd_train.elastic.dispatcher._LAST_COMMIT_S", 0.3)
    monkeypatch.setattr("hvd_train.elastic.dispatcher._QUIET_S", 1000.0)
    first, second = (ranks.worker for ranks in two.started)
    two.ask(first, second)
    two.dispatcher.heartbeat_received(second)
    two.interrupted.set()
    two.exit_codes |= {first: 143, second: 255}
    assert two.dispatcher.heartbeat_received(second) == "stop"
    wait_for("an end", lambda: two.dispatcher.heartbeat_received(second) == "end")


def test_a_heartbeat_after_the_lifeline_was_cut_proves_that_a_worker_lives(
    two: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    """Something between the hosts may cut connections that carry nothing; and then an ssh fails as well."""
    first, second = (ranks.worker for ranks in two.started)
    two.ask(first, second)
    theirs, ours = socket.socketpair()
    two.dispatcher.lifeline_opened(second, ours)
    theirs.close()
    wait_for("the cut", lambda: two.dispatcher._processes[second].cut_at)
    assert two.dispatcher.heartbeat_received(second) == "train"
    two.exit_codes[second] = 255
    beats_until_told(two, second, capsys)
    assert two.dispatcher.may_ask(second) == "ask"


def test_a_worker_that_was_taken_out_is_not_followed(two: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ssh has ended with 255 since we have ended it: its slot is free, though it may still beat for a while."""
    monkeypatch.setattr("hvd_train.elastic.dispatcher._QUIET_S", 1000.0)
    second = two.started[1].worker
    assert two.dispatcher.heartbeat_received(second) == "train"
    two.deaf.add(second)
    two.hosts = {"a": 1}
    wait_for("its end", lambda: two.dispatcher.heartbeat_received(second) == "end")
    two.exit_codes[second] = 255
    wait_for("its slot", lambda: two.dispatcher.heartbeat_received(second) and two.dispatcher.may_ask(second) == "end")
    assert second not in two.dispatcher._processes


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_the_driver_ends_the_job_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its workers, and not as a success: the supervisor starts it again."""
    job = Job({"a": 1})

    def broken(commands: object) -> None:
        raise KeyError("a slip of ours")

    job.start()
    monkeypatch.setattr(job.dispatcher._roster, "commands", broken)
    assert job.dispatcher.wait_for_end() == Finish(1, "the driver failed (see above)")


def test_a_worker_that_dies_while_it_waits_is_waited_for_no_more(two: Job) -> None:
    """Its request, which the server keeps a thread for, is answered."""
    first = two.started[0].worker
    asking = threading.Thread(target=two.dispatcher.wait_for_ranks, args=("a", first), daemon=True)
    asking.start()
    wait_for("its request", lambda: two.dispatcher._processes[first].waiting)
    two.exit_codes[first] = 137
    asking.join(20)
    assert not asking.is_alive()


def test_a_worker_that_waits_when_a_signal_comes_is_answered(two: Job) -> None:
    """It waits in vain, and the launcher would wait for its last commit."""
    first = two.started[0].worker
    asking = threading.Thread(target=two.dispatcher.wait_for_ranks, args=("a", first), daemon=True)
    asking.start()
    wait_for("its request", lambda: two.dispatcher._processes[first].waiting)
    two.deaf |= {ranks.worker for ranks in two.started}
    two.dispatcher.stop()
    two.interrupted.set()
    asking.join(20)
    assert not asking.is_alive()
    assert two.dispatcher._processes, "it has not been answered since the job is over"


def test_ends_that_the_job_has_asked_for_are_not_spoken_of(two: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """With whichever exit code: the user has read that a worker is taken out, or that the job is over."""
    first, second = (ranks.worker for ranks in two.started)
    two.ask(first, second)
    two.deaf |= {first, second}
    two.dispatcher.last_word_received(second, LastWord(4, "x"))
    two.exit_codes[second] = 4
    wait_for("the end", lambda: two.dispatcher._finish)
    two.exit_codes[first] = 137
    assert two.dispatcher.wait_for_end() == Finish(4, "b[0] ended with exit code 4")
    assert capsys.readouterr().err == "hvd-train: worker b[0]: x\n"


def test_a_worker_that_is_taken_out_ends_with_no_other_word(two: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """The user reads why it was taken out, and not what that has done to its process."""
    second = two.started[1].worker
    two.deaf.add(second)
    two.hosts = {"a": 1}
    wait_for("its end", lambda: two.dispatcher.heartbeat_received(second) == "end")
    two.exit_codes[second] = 137
    wait_for("the end of its process", lambda: second not in two.dispatcher._processes)
    assert capsys.readouterr().err == "hvd-train: worker b[0] is taken out: its host is no longer listed\n"


def test_a_worker_that_ends_well_is_not_spoken_of(two: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor one that has committed; the job goes on, or is over."""
    first, second = (ranks.worker for ranks in two.started)
    two.ask(first, second)
    two.exit_codes |= {first: 0, second: 75}
    assert two.dispatcher.wait_for_end() == Finish(75, "stopped, and committed")
    assert capsys.readouterr().err == ""


def test_a_followed_worker_that_is_taken_out_is_soon_followed_no_more(
    two: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its slot is free once it is quiet, which it is sooner than one that trains is taken for dead."""
    monkeypatch.setattr("hvd_train.elastic.dispatcher.SILENT_S", 1000.0)
    first, second = sorted(ranks.worker for ranks in two.started)
    two.ask(first, second)
    two.dispatcher.heartbeat_received(second)
    two.exit_codes[second] = 255
    printed = [""]

    def told() -> bool:
        two.dispatcher.heartbeat_received(second)
        printed[0] += capsys.readouterr().err
        return "its heartbeats still come" in printed[0]

    wait_for("a word about it", told)
    two.hosts = {"a": 1}
    wait_for("a wish to change", lambda: two.dispatcher.heartbeat_received(first) == "change")
    monkeypatch.setattr("hvd_train.elastic.dispatcher._LEAVE_S", 0.01)
    two.ask(first, second)
    wait_for("its end", lambda: second not in two.dispatcher._processes)
    printed[0] += capsys.readouterr().err
    assert printed[0].count("its heartbeats still come") == 1
    assert "exit code" not in printed[0]


def test_a_lifeline_that_breaks_is_cut(two: Job) -> None:
    """A connection that is reset says the same as one that is closed."""
    second = two.started[1].worker
    theirs, ours = socket.socketpair()
    ours.sendall(b"what is not read when the other side closes")
    two.dispatcher.lifeline_opened(second, ours)
    theirs.close()
    wait_for("the cut", lambda: two.dispatcher._processes[second].cut_at)
    assert ours.fileno() == -1, "nothing of it is left open"


def test_a_lifeline_may_be_silent_for_as_long_as_it_likes(two: Job) -> None:
    """The server gives its connections a limit, which is not meant for this one."""
    theirs, ours = socket.socketpair()
    ours.settimeout(5.0)
    two.dispatcher.lifeline_opened(two.started[1].worker, ours)
    wait_for("no limit", lambda: ours.gettimeout() is None)
    theirs.close()
    wait_for("the end of it", lambda: ours.fileno() == -1)
    two.dispatcher.lifeline_opened(7, socket.socketpair()[0])  # of nobody
