"""An elastic job with workers that are threads: what they are started with, what they are answered, how it all ends."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hvd_train.elastic import orphans
from hvd_train.elastic.dispatcher import _LAST_COMMIT_S, Dispatcher
from hvd_train.elastic.ranks import RankAssignment
from hvd_train.elastic.roster import SILENT_WHILE_MEETING_S, Finish, Roster
from hvd_train.launch.last_word import LastWord
from hvd_train.launch.launcher import GOES_ON, REPLACES, SLOT, SPENT, STARTED, SUPERVISOR, WORKER
from tests.support.launching import wait_for


class Job:
    """A job whose processes last until the test ends them with an exit code, or the job does."""

    def __init__(self, hosts: dict[str, int], min_workers: int = 1) -> None:
        self.hosts = hosts
        self.worlds: list[int] = []
        self.started: list[RankAssignment] = []
        self.exit_codes: dict[int, int] = {}
        self.deaf: set[int] = set()
        """Workers whose processes go on, whatever they are told."""
        self.interrupted = threading.Event()
        roster = Roster(min_workers, min_workers, 8, patience_s=60)
        self.dispatcher = Dispatcher(roster, lambda: self.hosts, lambda ranks: self.worlds.append(len(ranks)))

    def start(self) -> None:
        """Start as many workers as there are slots, and wait until they are there."""
        slots = sum(self.hosts.values())
        self.dispatcher.start(slots, self._run_worker, self.interrupted)
        wait_for("all workers", lambda: len(self.started) == slots)

    def _run_worker(self, ranks: RankAssignment, events: list[threading.Event]) -> tuple[int, float]:
        self.started.append(ranks)
        while ranks.worker in self.deaf or not any(event.is_set() for event in events):
            if ranks.worker in self.exit_codes:
                return self.exit_codes[ranks.worker], 0.0
            events[0].wait(0.01)
        return 143, 0.0

    def ask(self, *numbers: int) -> dict[int, RankAssignment | None]:
        """These workers ask for a rank at the same time; what they are answered."""
        answers: dict[int, RankAssignment | None] = {}

        def one(number: int) -> None:
            host = next(ranks.hostname for ranks in self.started if ranks.worker == number)
            answers[number] = self.dispatcher.wait_for_ranks(host, number)

        threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in numbers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert answers.keys() == set(numbers)
        return answers

    def end(self) -> Finish:
        """All workers that are left end well; how the job has finished then."""
        self.deaf.clear()
        for ranks in self.started:
            self.exit_codes.setdefault(ranks.worker, 0)
        self.dispatcher.stop()
        return self.dispatcher.wait_for_end()


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """A job of two workers on two hosts, which are started and have no ranks yet."""
    monkeypatch.setattr("hvd_train.elastic.dispatcher._QUIET_S", 0.01)
    monkeypatch.setattr("hvd_train.elastic.discovery._EVERY_S", 0.05)
    job = Job({"a": 1, "b": 1})
    job.start()
    yield job
    monkeypatch.setattr("hvd_train.elastic.dispatcher._QUIET_S", 0.01)
    job.interrupted.set()
    job.end()


def test_a_world_forms_when_all_have_asked(two: Job) -> None:
    """Each worker gets its ranks, the rendezvous is told before, and the job ends well with all of them."""
    numbers = [ranks.worker for ranks in two.started]
    answers = two.ask(*numbers)
    assert sorted(ranks.rank for ranks in answers.values() if ranks) == [0, 1]
    assert two.worlds == [2]
    assert [two.dispatcher.heartbeat_received(number) for number in numbers] == ["train", "train"]
    assert two.end() == Finish(0, "done")


def test_a_process_learns_its_number_and_slot(two: Job) -> None:
    """And nothing of a predecessor, for there is none."""
    for ranks in two.started:
        assert ranks.environment[WORKER] == str(ranks.worker)
        assert ranks.environment[SLOT] == "0"
        assert 0 <= float(ranks.environment[SPENT]) < 60
        assert not {REPLACES, GOES_ON} & ranks.environment.keys()


def test_a_process_learns_with_how_many_it_shares_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it has a rank: it has to choose how many threads compute."""
    monkeypatch.setattr("hvd_train.elastic.dispatcher._QUIET_S", 0.01)
    job = Job({"a": 2, "b": 1})
    job.start()
    assert sorted((ranks.hostname, ranks.local_size) for ranks in job.started) == [("a", 2), ("a", 2), ("b", 1)]
    job.interrupted.set()
    job.end()


def test_a_worker_learns_how_old_the_job_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the start of the supervisor on, whichever driver starts it."""
    monkeypatch.setenv(STARTED, str(time.monotonic() - 1000))
    monkeypatch.setattr("hvd_train.elastic.dispatcher._QUIET_S", 0.01)
    job = Job({"a": 1})
    job.start()
    assert 1000 <= float(job.started[0].environment[SPENT]) < 1060
    job.interrupted.set()
    job.end()


def test_a_worker_that_dies_is_replaced(two: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """The user reads its exit code; its successor knows whom it replaces and that it continues a job."""
    first, second = sorted(ranks.worker for ranks in two.started)
    two.ask(first, second)
    two.exit_codes[second] = 137
    wait_for("the successor", lambda: len(two.started) == 3)
    successor = two.started[2]
    assert successor.environment[REPLACES] == str(second)
    assert successor.environment[GOES_ON] == "1"
    assert "ended with exit code 137" in capsys.readouterr().err
    assert two.dispatcher.heartbeat_received(second) == "end"
    assert two.dispatcher.may_ask(second) == "end"
    assert two.dispatcher.may_ask(first) == "ask"


def test_members_hear_of_a_newcomer_when_it_is_ready(two: Job) -> None:
    """Not while it imports."""
    first, second = (ranks.worker for ranks in two.started)
    two.ask(first, second)
    two.hosts = {"a": 1, "b": 1, "c": 1}
    wait_for("the newcomer", lambda: len(two.started) == 3)
    newcomer = two.started[2].worker
    assert two.dispatcher.heartbeat_received(first) == "train"
    asking = threading.Thread(target=two.ask, args=(newcomer,), daemon=True)
    asking.start()
    wait_for("a wish to change", lambda: two.dispatcher.heartbeat_received(first) == "change")
    two.ask(first, second)
    asking.join(20)
    assert two.worlds == [2, 3]


def test_a_worker_that_runs_something_else_is_refused(two: Job) -> None:
    """The first worker says what the job runs."""
    first, second = (ranks.worker for ranks in two.started)
    two.dispatcher.facts_received(first, {"host": "a", "torch": "2.15"})
    two.dispatcher.facts_received(second, {"host": "b", "torch": "2.14"})
    assert two.dispatcher.problem_of(first) == ""
    assert two.dispatcher.problem_of(second).startswith("b differs from the job in torch: 2.14 there, 2.15 on a")
    assert two.dispatcher.problem_of(7) == ""


def test_a_worker_that_is_not_of_the_job_gets_no_rank(two: Job) -> None:
    """It has been given up, and is to leave."""
    assert two.dispatcher.wait_for_ranks("a", 7) is None
    assert two.dispatcher.heartbeat_received(7) == "end"


def test_after_a_signal_all_are_told_to_stop(two: Job) -> None:
    """The job is over when the processes have ended and no heartbeat comes any more."""
    numbers = [ranks.worker for ranks in two.started]
    two.ask(*numbers)
    two.interrupted.set()
    assert [two.dispatcher.heartbeat_received(number) for number in numbers] == ["stop", "stop"]
    assert two.end() == Finish(1, "stopped")


def test_a_worker_whose_ssh_has_failed_stays_while_its_heart_beats(
    two: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its driver's network may have been away; only when it is silent it is gone, and its slot gets another worker."""
    first, second = sorted(ranks.worker for ranks in two.started)
    two.ask(first, second)
    two.dispatcher.heartbeat_received(second)
    two.exit_codes[second] = 255
    printed = [""]

    def told() -> bool:
        assert two.dispatcher.heartbeat_received(second) == "train"
        printed[0] += capsys.readouterr().err
        return "its heartbeats still come" in printed[0]

    wait_for("a word about it", told)
    assert two.dispatcher.may_ask(second) == "ask"
    monkeypatch.setattr("hvd_train.elastic.dispatcher.SILENT_S", 0.1)
    wait_for("its successor", lambda: len(two.started) == 3)
    assert two.started[2].environment[REPLACES] == str(second)
    assert two.dispatcher.heartbeat_received(second) == "end"


@pytest.mark.parametrize("cut_first", [False, True])
def test_a_worker_whose_ssh_and_lifeline_are_gone_is_dead_at_once(
    two: Job, cut_first: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others need not wait for its silence; a heartbeat after the cut would prove that it lives."""
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
    begun = time.monotonic()
    assert two.ask(first)[first] is not None
    assert time.monotonic() - begun < SILENT_WHILE_MEETING_S / 2
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


def test_a_job_that_is_over_waits_for_a_followed_worker_until_it_is_silent(two: Job) -> None:
    """And not for ever; meanwhile it is told to end."""
    first, second = sorted(ranks.worker for ranks in two.started)
    two.ask(first, second)
    two.dispatcher.heartbeat_received(second)
    two.exit_codes[second] = 255
    two.interrupted.set()
    assert two.dispatcher.heartbeat_received(second) == "stop"
    assert two.end() == Finish(1, "stopped")


def test_a_signal_to_one_worker_is_a_change_and_to_all_a_stop(
    two: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one that leaves gets no rank, and has the time for its last commit before it is ended."""
    timers, timer = list[float](), threading.Timer

    def noted(seconds: float, function: Callable[[], None]) -> threading.Timer:
        timers.append(seconds)
        return timer(seconds, function)

    monkeypatch.setattr(threading, "Timer", noted)
    first, second = sorted(ranks.worker for ranks in two.started)
    two.ask(first, second)
    assert two.dispatcher.told_to_end(second) == "change"
    assert two.dispatcher.heartbeat_received(first) == "change"
    assert two.ask(second) == {second: None}
    assert timers == [_LAST_COMMIT_S]
    assert "worker b[0] is taken out: it was told to end by a signal" in capsys.readouterr().err
    two.exit_codes[second] = 143
    assert two.ask(first)[first] is not None
    assert two.dispatcher.told_to_end(first) == "stop"
    two.exit_codes[first] = 143
    assert two.end() == Finish(143, "stopped, and committed")


def test_an_error_is_printed_once_and_its_copies_are_counted(two: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """Two copies differ in numbers only; the exit code is no news any more."""
    first, second = (ranks.worker for ranks in two.started)
    for number in (first, second):
        error = f"Traceback:\n  File m.py, line 3\nNameError: typo in process {number}"
        two.dispatcher.last_word_received(number, LastWord(1, error))
    two.exit_codes |= {first: 1, second: 1}
    wait_for("successors", lambda: len(two.started) > 2)
    two.dispatcher.last_word_received(two.started[2].worker, LastWord(1, "something else"))
    printed = capsys.readouterr().err
    assert printed.count("NameError") == 1
    assert ":\nTraceback:\n" in printed, "the lines of a traceback stand below each other"
    assert "the same error (2 times so far)" in printed
    assert ": something else\n" in printed
    assert "exit code" not in printed
    two.dispatcher.last_word_received(7, LastWord(1, "no worker of the job"))
    assert capsys.readouterr().err == ""


def test_no_more_workers_are_waited_for_than_there_may_be() -> None:
    """`-np 6 --max-np 2` is two workers from the start on, not after a minute."""
    roster, interrupted = Roster(1, 1, 2, patience_s=60), threading.Event()
    interrupted.set()
    dispatcher = Dispatcher(roster, dict, lambda _: None)
    dispatcher.start(6, lambda *_: (0, 0.0), interrupted)
    assert roster.start_workers == 2
    dispatcher.stop()
    assert dispatcher.wait_for_end() == Finish(1, "stopped")


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The numbers of workers whose processes were killed."""
    numbers: list[str] = []
    monkeypatch.setattr(orphans, "kill_worker", lambda number, job: numbers.append(number))
    return numbers


def test_a_worker_that_is_taken_out_hears_of_it_and_may_end_by_itself(two: Job, killed: list[str]) -> None:
    """Its process may live on for a while, as one behind an ssh does; killed it would leave half a commit."""
    first, second = (ranks.worker for ranks in two.started)
    two.deaf.add(second)
    two.hosts = {"a": 1}
    wait_for("its end", lambda: two.dispatcher.heartbeat_received(second) == "end")
    assert second in two.dispatcher._processes
    assert two.dispatcher.heartbeat_received(first) == "train"
    assert killed == []


def test_a_worker_that_does_not_leave_is_ended(two: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for a rank and hears that there is none; whoever hangs then would keep its GPU for ever."""
    monkeypatch.setattr("hvd_train.elastic.dispatcher._LEAVE_S", 0.05)
    second = two.started[1].worker
    asking = threading.Thread(target=two.dispatcher.wait_for_ranks, args=("b", second), daemon=True)
    asking.start()
    wait_for("its request", lambda: two.dispatcher._processes[second].waiting)
    two.hosts = {"a": 1}
    wait_for("its end", lambda: second not in two.dispatcher._processes)
    asking.join(20)
    assert not asking.is_alive()


def test_a_worker_that_is_silent_is_killed(two: Job, killed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process hears nothing, and would keep its GPU; whoever beats is spared."""
    first, second = (ranks.worker for ranks in two.started)
    two.ask(first, second)
    monkeypatch.setattr("hvd_train.elastic.roster.SILENT_S", 0.5)
    wait_for("its end", lambda: two.dispatcher.heartbeat_received(first) == "train" and killed)
    assert killed == [str(second)]


def test_a_worker_asks_by_the_local_rank_of_its_last_world() -> None:
    """As Horovod's core does, which knows nothing of numbers; another one may have had that local rank before."""
    job = Job({"a": 2}, min_workers=1)
    job.start()
    ranks_of = {ranks.local_rank: ranks for ranks in job.ask(*(r.worker for r in job.started)).values() if ranks}
    job.exit_codes[ranks_of[0].worker] = 137
    alone = job.dispatcher.wait_for_ranks("a", 1)
    assert alone is not None
    assert (alone.worker, alone.size, alone.local_rank) == (ranks_of[1].worker, 1, 0)
    wait_for("the successor", lambda: len(job.started) == 3)
    newcomer = threading.Thread(target=job.ask, args=(job.started[2].worker,), daemon=True)
    newcomer.start()
    wait_for("a wish to change", lambda: job.dispatcher.heartbeat_received(alone.worker) == "change")
    both = job.dispatcher.wait_for_ranks("a", 0)
    assert both is not None
    assert (both.worker, both.size, both.rank) == (alone.worker, 2, 0)
    newcomer.join(20)
    assert job.end() == Finish(0, "done")


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
    printed = [""]

    def told() -> bool:
        assert two.dispatcher.heartbeat_received(second) == "train"
        printed[0] += capsys.readouterr().err
        return "its heartbeats still come" in printed[0]

    wait_for("a word about it", told)
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
