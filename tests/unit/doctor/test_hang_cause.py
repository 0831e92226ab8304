"""Who keeps a job from going on, decided from what was seen of each rank: the eight hangs, and what is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hvd_train.doctor.hang_cause import Answer, Launcher, Process, Rank, explain
from hvd_train.doctor.hang_stacks import Frame, Thread
from hvd_train.progress.whereabouts import Whereabouts

_SECOND = 10**9
_HOROVOD = Frame("/venv/site-packages/horovod/torch/mpi_ops.py", 1310, "synchronize")
_TRAIN = Frame("/home/me/train.py", 3, "<module>")


def stack(*frames: Frame) -> tuple[Thread, ...]:
    """Return the threads of a process that has one."""
    return (Thread("0x1", (*frames, _TRAIN), has_signal=True),)


def waits(number: int, what: str = "the sum of gradients", step: int = 812) -> Rank:
    """Return a rank that has waited for the others for 40 s."""
    where = Whereabouts(number, 4, step, "reduction", 0, what, 0)
    process = Process(100 + number, "hvd-train", "S", 0.01, "futex", threads=stack(_HOROVOD))
    return Rank(number, f"h{number}", process, where=where, now=40 * _SECOND)


def works(number: int, phase: str = "forward", frame: Frame | None = None) -> Rank:
    """Return a rank that has been in one phase of step 812 for 41 s, and waits for nobody."""
    where = Whereabouts(number, 4, 812, phase, 0, "", 0)
    threads = stack(frame or Frame("/home/me/mine.py", 31, "forward"))
    process = Process(100 + number, "hvd-train", "S", 0.01, "futex", threads=threads)
    return Rank(number, f"h{number}", process, where=where, now=41 * _SECOND)


def beside(*guilty: Rank) -> list[Rank]:
    """Return a job of four ranks in which all but these wait for them."""
    known = {rank.number: rank for rank in guilty}
    return [known.get(number) or waits(number) for number in range(4)]


def of_first(answer: Answer) -> tuple[str, int | None, str, str]:
    """Return kind, rank, host and place of the first culprit."""
    first = answer.culprits[0]
    return first.kind, first.rank, first.host, first.place


def test_a_lock_in_the_model() -> None:
    """The rank is named with its host and line, how long it has been there, and who waits for it in what."""
    answer = explain(beside(works(2)), None, {"/home/me/mine.py:31": "self.lock.acquire()"})
    assert of_first(answer) == ("lock", 2, "h2", "mine.py:31")
    assert answer.sentence == (
        "rank 2 on h2 has been waiting for a lock, or for another thread, for 41 s (mine.py:31, in forward); it is in "
        "the forward pass of step 812; ranks 0, 1 and 3 wait for it in the sum of gradients of step 812"
    )


def test_a_loader_process_that_waits_for_a_lock() -> None:
    """Its line is that of the loader process; others of them, which wait for tasks, are not blamed."""
    idle = Process(8, "pt_data_worker", "S", 0.0, "poll", threads=stack(Frame("/lib/python3.11/queues.py", 1, "get")))
    fetch = Frame("/venv/site-packages/torch/utils/data/_utils/fetch.py", 55, "fetch")
    stuck = replace(idle, number=9, call="futex", threads=stack(Frame("/home/me/mine.py", 7, "__getitem__"), fetch))
    rank = replace(works(1, "data", Frame("/lib/python3.11/selectors.py", 415, "select")), children=(idle, stuck))
    answer = explain(beside(rank), None, {})
    assert of_first(answer) == ("lock", 1, "h1", "mine.py:7")
    assert answer.culprits[0].process == 9
    assert "its loader process 9 has been waiting for a lock" in answer.sentence


def test_a_process_that_is_stopped() -> None:
    """State T is the cause, whatever its record said last, and what lets it go on is told."""
    rank = waits(3)
    assert rank.process is not None
    answer = explain(beside(replace(rank, process=replace(rank.process, state="T", threads=()))), None, {})
    assert of_first(answer)[:3] == ("stopped", 3, "h3")
    assert "kill -CONT 103" in answer.sentence
    assert answer.sentence.endswith("ranks 0, 1 and 2 wait for it in the sum of gradients of step 812")


def test_a_stopped_loader_process() -> None:
    """What a rank has started is looked at, too."""
    rank = replace(works(1, "data"), children=(Process(9, "pt_data_worker", "T", 0.0),))
    answer = explain(beside(rank), None, {})
    assert of_first(answer)[:3] == ("stopped", 1, "h1")
    assert answer.culprits[0].process == 9


def test_a_host_whose_link_is_cut() -> None:
    """A host that does not answer keeps the others waiting; one that does not let us in is blamed only at last."""
    cut = Rank(2, "h2", None, silence="no answer within 10 s", out_of_reach=True)
    answer = explain(beside(cut), None, {})
    assert of_first(answer)[:3] == ("silent", 2, "h2")
    locked = Rank(2, "h2", None, silence="Permission denied (publickey)")
    assert of_first(explain(beside(locked, works(1)), None, {}))[:3] == ("lock", 1, "h1")
    assert of_first(explain(beside(locked), None, {}))[:3] == ("unseen", 2, "h2")


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"call": "open"}, ""),
        ({"state": "D", "call": ""}, ""),
        ({"call": "read", "file": "/data/a.jpg"}, ""),
        ({"call": "", "kernel": "wait_for_partner"}, "with open(path) as file:"),
    ],
)
def test_a_file_system_that_does_not_answer(changed: dict[str, str], line: str) -> None:
    """The kernel tells it by the call or the state; where it tells nothing, the line of code does."""
    rank = works(2, "data", Frame("/home/me/mine.py", 31, "__getitem__"))
    assert rank.process is not None
    rank = replace(rank, process=replace(rank.process, **changed))
    answer = explain(beside(rank), None, {"/home/me/mine.py:31": line})
    assert of_first(answer) == ("files", 2, "h2", "mine.py:31")


def test_a_read_of_a_pipe_is_no_file_system() -> None:
    """A process that waits for another one by a pipe waits for no disk."""
    rank = works(2)
    assert rank.process is not None
    rank = replace(rank, process=replace(rank.process, call="read", file="pipe:[12]"))
    assert explain(beside(rank), None, {}).kind == "waits"


def test_an_endless_loop() -> None:
    """It uses its core and comes no further; a wait for a lock in the same line uses none."""
    rank = works(0)
    assert rank.process is not None
    rank = replace(rank, process=replace(rank.process, cpu=0.97, state="R", call=""))
    answer = explain(beside(rank), None, {"/home/me/mine.py:31": "lock.acquire()"})
    assert of_first(answer) == ("loop", 0, "h0", "mine.py:31")


def test_a_collective_that_one_rank_skips() -> None:
    """The rank that is past it is named, with the line where the others wait; also where there are as many of both."""
    in_theirs = Rank(
        0,
        "h0",
        Process(100, "hvd-train", "S", 0.0, "futex", threads=stack(_HOROVOD, Frame("/home/me/mine.py", 40, "forward"))),
        where=Whereabouts(0, 2, 812, "forward", 0, "", 0),
        now=40 * _SECOND,
    )
    for number in (1, 3):
        job = [replace(in_theirs, number=other, host=f"h{other}") for other in range(number)] + [waits(number)]
        answer = explain(job, None, {})
        assert of_first(answer) == ("skipped", number, f"h{number}", "mine.py:40")
    ahead = [waits(0, "evaluation", 12), waits(1, "evaluation", 12), waits(2, "broadcast", 12)]
    assert of_first(explain(ahead, None, {}))[:3] == ("skipped", 2, "h2")


def test_a_driver_that_is_stopped() -> None:
    """It comes first: ranks that have ended since, or wait, do so because of it."""
    gone = [replace(rank, process=None, where=None) for rank in beside()]
    answer = explain(gone, Launcher("python", "h1", 77, "T"), {})
    assert (answer.kind, answer.culprits[0].host, answer.culprits[0].process) == ("launcher", "h1", 77)
    assert "ranks 0, 1, 2 and 3 have ended" in answer.sentence


def test_a_rank_that_has_ended() -> None:
    """Others that do not wait yet are not blamed for it."""
    gone = Rank(1, "h1", None)
    assert of_first(explain(beside(gone, works(2)), None, {}))[:3] == ("gone", 1, "h1")


def test_all_wait_in_the_same_sum() -> None:
    """Then no rank is missing, and the network is named."""
    answer = explain(beside(), None, {})
    assert answer.kind == "between"
    assert "all ranks have waited in the sum of gradients of step 812 for 40 s" in answer.sentence


def test_a_job_that_goes_on() -> None:
    """Ranks that moved between the looks do not hang, however long a wait may last."""
    answer = explain([replace(rank, moved=rank.number == 1) for rank in beside(works(2))], None, {})
    assert (answer.kind, answer.culprits) == ("nothing", ())
    assert answer.sentence.startswith("nothing hangs")


def test_the_longest_wait_is_named_first() -> None:
    """Of several ranks that wait for nobody the one that stopped first is the likeliest, and all are named."""
    late = works(0)
    assert late.where is not None
    late = replace(late, where=replace(late.where, phase_since=30 * _SECOND))
    answer = explain(beside(late, works(2)), None, {})
    assert [culprit.rank for culprit in answer.culprits] == [2, 0]
    assert "so it is with rank 0" in answer.sentence
