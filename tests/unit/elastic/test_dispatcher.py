"""An elastic job with workers that are threads: what they are started with, what they are answered, how it all ends."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from hvd_train.elastic.dispatcher import Dispatcher
from hvd_train.elastic.roster import SILENT_S, Finish, Roster
from hvd_train.launch.last_word import LastWord
from hvd_train.launch.launcher import GOES_ON, JOB, OWNER, REPLACES, SLOT, SPENT, STARTED, WORKER
from tests.support.dispatched import Job
from tests.support.launching import wait_for


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
    """The user reads its exit code and what that means; its successor knows whom it replaces and that a job goes on."""
    first, second = sorted(ranks.worker for ranks in two.started)
    two.ask(first, second)
    two.exit_codes[second] = 137
    wait_for("the successor", lambda: len(two.started) == 3)
    successor = two.started[2]
    assert successor.environment[REPLACES] == str(second)
    assert successor.environment[GOES_ON] == "1"
    assert "ended with exit code 137 (killed from outside" in capsys.readouterr().err
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


def test_a_worker_that_is_silent_is_killed(two: Job, killed: list[str]) -> None:
    """A stopped process hears nothing, and would keep its GPU; whoever beats is spared."""
    first, second = (ranks.worker for ranks in two.started)
    two.ask(first, second)
    two.dispatcher._roster.heartbeat_received(second, time.monotonic() - SILENT_S - 1)
    wait_for("its end", lambda: two.dispatcher.heartbeat_received(first) == "train" and killed)
    assert killed == [f"{second} of {two.started[1].environment[JOB]}"]


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


def test_a_worker_learns_the_names_of_its_job(two: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that no other job has; and that of the supervisor's job, which lasts longer, where there is one."""
    (name,) = {ranks.environment[JOB] for ranks in two.started}
    assert {ranks.environment[OWNER] for ranks in two.started} == {name}
    monkeypatch.setenv(OWNER, "the supervisor's")
    monkeypatch.setattr("hvd_train.elastic.dispatcher._QUIET_S", 0.01)
    other = Job({"a": 1})
    other.start()
    (ranks,) = other.started
    assert ranks.environment[OWNER] == "the supervisor's"
    assert len({name, ranks.environment[JOB], ranks.environment[OWNER]}) == 3
    other.interrupted.set()
    other.end()


def test_what_happens_has_its_consequences_at_once(two: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the roster is asked the next time: seconds of waiting, summed over changes, are a lost machine."""
    monkeypatch.setattr("hvd_train.elastic.dispatcher._TICK_S", 1000.0)
    first, second = (ranks.worker for ranks in two.started)
    two.hosts = {"a": 1, "b": 1, "c": 1}
    wait_for("the newcomer", lambda: len(two.started) == 3)
    two.dispatcher.stop()  # each list of hosts is a tick, too
    two.ask(first, second)
    two.deaf.add(second)
    asking = threading.Thread(target=two.ask, args=(first,), daemon=True)
    asking.start()
    wait_for("its request", lambda: two.dispatcher._processes[first].waiting)
    two.dispatcher.last_word_received(second, LastWord(1, "Traceback", "training", 3))
    asking.join(20)
    assert two.worlds == [2, 1]
    theirs, ours = socket.socketpair()
    two.dispatcher.lifeline_opened(first, ours)
    two.dispatcher.heartbeat_received(first)
    two.exit_codes[first] = 255
    theirs.close()
    wait_for("its end", lambda: first not in two.dispatcher._processes)
    two.exit_codes[second] = 1
    wait_for("its end", lambda: second not in two.dispatcher._processes)


def test_no_thread_of_a_job_keeps_the_launcher_from_ending() -> None:
    """It ends when its main thread does; and the thread that obeys the roster ends with the job."""
    before = set(threading.enumerate())
    job = Job({"a": 1})
    job.start()
    theirs, ours = socket.socketpair()
    job.dispatcher.lifeline_opened(job.started[0].worker, ours)
    job.ask(job.started[0].worker)
    mine = set(threading.enumerate()) - before
    assert len(mine) >= 3
    assert all(thread.daemon for thread in mine)
    theirs.close()
    assert job.end() == Finish(0, "done")
    wait_for("the threads", lambda: not any(thread.is_alive() for thread in mine))


def test_the_user_reads_what_the_job_waits_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the words of the roster."""
    monkeypatch.setattr("hvd_train.elastic.waiting.SOON_S", 0.0)
    monkeypatch.setattr("hvd_train.elastic.dispatcher._QUIET_S", 0.01)
    job = Job({"a": 1}, min_workers=2)
    job.start()
    printed = [""]

    def told() -> bool:
        printed[0] += capsys.readouterr().err
        return "hvd-train: waiting for workers: 0 of 2 are ready" in printed[0]

    wait_for("the line", told)
    job.interrupted.set()
    job.end()


def test_a_worker_that_is_to_leave_does_so_when_the_others_have_met(two: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exit would take a core that they need meanwhile; at the end of the job nobody waits any more."""
    monkeypatch.setattr("hvd_train.elastic.dispatcher._MEETING_S", 1000.0)
    left = threading.Event()
    first, second = (ranks.worker for ranks in two.started)
    two.ask(first, second)
    two.dispatcher.told_to_end(second)
    leaving = lambda: [two.dispatcher.wait_for_ranks("b", second), left.set()]  # noqa: E731
    threading.Thread(target=leaving, daemon=True).start()
    wait_for("its end", lambda: two.dispatcher._processes[second].waiting is False and two.ask(first))
    assert not left.wait(0.1)
    two.dispatcher.stop()
    assert left.wait(20)


def test_facts_of_a_worker_that_has_ended_are_no_error(two: Job) -> None:
    """They were on their way when it died; the job runs what it has said."""
    two.dispatcher.facts_received(7, {"host": "a", "torch": "2.15"})
    second = two.started[1].worker
    two.dispatcher.facts_received(second, {"host": "b", "torch": "2.14"})
    assert "2.14 there, 2.15 on a" in two.dispatcher.problem_of(second)
