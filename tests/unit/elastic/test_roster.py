"""Which workers a job starts, admits, awaits and evicts, and when it ends, on a simulated clock."""

import pytest

from hvd_train.elastic.roster import TOO_FEW_WORKERS, Finish
from hvd_train.elastic.worker import COMMITTED
from tests.support.jobs import Play, training


def later(hosts: dict[str, int], **limits: int) -> Play:
    """Return a job that has trained for a while: limits count from an event, not from the start of the job."""
    play = training(hosts, **limits)
    play.wait(100)
    return play


def test_the_first_world_waits_for_all_workers_for_a_minute() -> None:
    play = Play({"a": 2, "b": 1}, first=3)
    one, two, three = play.started
    play.ask(one, three)
    assert play.world == []
    play.ask(two)
    assert sorted(play.world) == sorted(play.started)

    play = Play({"a": 1, "gone": 1}, first=2, begins_at=100.0)
    play.ask(play.started[0])
    play.wait(60)
    assert play.world == []
    play.wait(1)
    assert play.world == [play.started[0]]


def test_a_newcomer_joins_when_it_is_ready() -> None:
    play = training({"a": 1, "b": 1})
    old = play.world
    play.find({"a": 1, "b": 1, "c": 1})
    new = play.started[-1]
    play.wait(60)
    assert not play.roster.wants_change()
    play.ask(new)
    assert (play.world, play.roster.wants_change()) == (old, True)
    play.ask(*old)
    assert (play.world, play.roster.wants_change()) == ([*old, new], False)


def test_a_host_that_keeps_failing_is_tried_at_growing_intervals() -> None:
    play = training({"a": 1})
    old = play.world
    play.find({"a": 1, "bad": 1})
    for _ in range(4):
        play.end(play.newest("bad"), 1)
        tried = len(play.started)
        while len(play.started) == tried:
            play.wait(1)
    assert play.now == 1 + 2 + 4 + 8
    assert (play.world, play.finish) == (old, None)


def test_a_silent_worker_is_evicted_after_ten_seconds() -> None:
    play = later({"a": 1, "b": 1}, fewest=2)
    silent = play.started[1]
    play.wait(10, silent)
    assert play.evicted == {}
    play.wait(1, silent)
    assert (play.evicted, play.killed) == ({silent: "no heartbeat for 11 s"}, [silent])


def test_survivors_wait_for_a_silent_member_for_three_seconds_only() -> None:
    play = later({"a": 1, "b": 1, "c": 1})
    one, two, silent = play.world
    play.ask(one, two)
    play.wait(3, silent)
    assert play.evicted == {}
    play.wait(1, silent)
    assert play.evicted == {silent: "no heartbeat for 4 s"}
    assert (play.killed, play.world) == ([silent], [one, two])


def test_a_member_that_sends_heartbeats_but_hangs_is_evicted_after_twenty_seconds() -> None:
    """Each rendezvous has its own twenty seconds."""
    play = later({"a": 1, "b": 1})
    one, hanging = play.world
    play.ask(one)
    play.wait(19)
    play.ask(hanging)
    assert (play.world, play.evicted) == ([one, hanging], {})
    play.wait(40)
    play.ask(one)
    play.wait(20)
    assert play.evicted == {}
    play.wait(1)
    assert play.evicted == {hanging: "it has not come to the new world within 20 s"}
    assert (play.killed, play.world) == ([hanging], [one])


def test_a_host_that_is_no_longer_listed_leaves_after_a_step() -> None:
    """Its member leaves after a step; its newcomers, building or ready, end at once."""
    play = training({"a": 1, "b": 1})
    one, two = play.world
    play.find({"a": 1, "b": 1, "c": 1, "d": 1})
    building, ready = play.started[2:]
    play.roster.rank_requested(ready, play.now)
    play.find({"b": 1})
    assert play.evicted == dict.fromkeys((building, ready), "its host is no longer listed")
    assert play.roster.wants_change()
    play.ask(one, two)
    assert play.world == [two]
    assert play.killed == []


def test_the_state_outlives_a_change_of_all_hosts() -> None:
    play = training({"a": 1})
    (old,) = play.world
    play.find({"b": 1})
    new = play.newest("b")
    assert not play.roster.wants_change()
    play.ask(new)
    assert play.roster.wants_change()
    play.ask(old)
    assert play.world == [old, new]
    assert not play.evicted
    assert play.roster.wants_change()
    play.ask(old, new)
    assert (play.world, list(play.evicted)) == ([new], [old])


def test_with_fewer_than_min_np_survivors_wait() -> None:
    """After the patience the job ends with 69."""
    play = later({"a": 1, "b": 1}, fewest=2)
    one, two = play.world
    play.find({"a": 1})
    play.end(two, 1)
    play.ask(one)
    play.wait(5)
    assert "with fewer than 2 the job ends in 595 s" in play.notices[0]
    play.wait(595)
    assert play.finish is None
    play.wait(1)
    assert play.finish == Finish(TOO_FEW_WORKERS, "fewer than 2 workers for 600 s")


def test_the_job_is_done_when_its_last_world_is_done() -> None:
    """The job does not wait for an evicted process, but for members that train."""
    play = training({"a": 1, "b": 1, "c": 1})
    one, two, stopped = play.world
    play.wait(12, stopped)
    play.end(two, 0)
    play.ask(one)
    assert (play.world, play.finish) == ([one], None)
    play.end(one, 0)
    assert play.finish == Finish(0, "done")
    for code in COMMITTED:  # a signal to all workers, or a time limit
        play = training({"a": 1, "b": 1})
        for number in play.world:
            play.end(number, code)
        assert play.finish == Finish(code, "stopped, and committed")


@pytest.mark.parametrize(("earlier", "code"), [("", 137), ("", 0), ("evicted", 143), ("signalled", 143)])
def test_if_all_members_die_new_workers_resume_from_the_last_commit(earlier: str, code: int) -> None:
    """Rank 0 decides; a rank that left with 0, or was evicted and stopped, does not make the job a success."""
    play = training({"a": 1, "b": 1})
    one, two = play.world
    if earlier == "evicted":
        play.wait(12, two)
    if earlier == "signalled":
        play.signal(two)
        play.ask(two)
    play.end(two, code)
    play.end(one, 137)
    assert play.finish is None
    play.wait(3)
    play.ask(*play.started[2:])
    assert play.world == play.started[2:]


def test_there_are_never_more_workers_than_max_np() -> None:
    """The next worker starts in the empty slot."""
    play = Play({"a": 2, "b": 2}, first=3, most=3)
    assert len(play.started) == 3
    play.ask(*play.started)
    play.find({"a": 2, "b": 2, "c": 4})
    assert not play.roster.wants_change()
    play.end(play.world[0], 137)
    assert len(play.started) == 4
    play.wait(100)
    assert len(play.started) == 4
