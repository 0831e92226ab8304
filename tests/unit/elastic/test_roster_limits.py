"""When the roster loses patience, to the second, whom it gives up then, and in which words it says so."""

from __future__ import annotations

import pytest

from hvd_train.elastic.roster import LEAVE_S, REPORT_S, SILENT_S, SILENT_WHILE_MEETING_S, TOO_FEW_WORKERS, Finish
from hvd_train.launch.last_word import LastWord
from tests.support.roster_play import Play, training

LATER = 100.0
"""Limits count from what has happened, and not from the start of the job."""


def later(hosts: dict[str, int], **limits: int) -> Play:
    """A job that has trained for a while."""
    play = training(hosts, **limits)
    play.wait(LATER)
    return play


@pytest.mark.parametrize("stage", ["training", "ready", "meeting"])
def test_a_silent_worker_is_given_up_after_ten_seconds(stage: str) -> None:
    """Whatever it does; only then, for a network may be away for seconds. Nobody waits until it leaves."""
    if stage == "training":
        play = later({"a": 1, "b": 1})
    elif stage == "ready":
        play = Play({"a": 1, "b": 1}, first=2, fewest=2)
        play.wait(LATER)
        play.ask(play.started[1])
        assert not play.world
    else:
        play = later({"a": 1, "b": 1}, fewest=2)
        play.end(play.world[0], 137)
        play.ask(play.world[1])
    silent = play.started[1]
    play.wait(SILENT_S, silent)
    assert play.taken_out == {}
    play.wait(1, silent)
    assert play.taken_out == {silent: "nothing was heard of it for 11 s"}
    assert play.given_up == [silent]


def test_a_member_that_the_others_miss_is_given_up_after_three_seconds() -> None:
    """Those that wait for it have noticed that something is wrong."""
    play = later({"a": 1, "b": 1})
    one, silent = play.world
    play.ask(one)
    play.wait(SILENT_WHILE_MEETING_S, silent)
    assert play.taken_out == {}
    play.wait(1, silent)
    assert play.taken_out == {silent: "nothing was heard of it for 4 s"}
    assert play.given_up == [silent]


def test_a_member_that_does_not_come_is_given_up_after_twenty_seconds() -> None:
    """It hangs in something, so it is not waited for any more."""
    play = later({"a": 1, "b": 1})
    one, hanging = play.world
    play.ask(one)
    play.wait(REPORT_S)
    assert play.taken_out == {}
    play.wait(1)
    assert play.taken_out == {hanging: "it has not come to the new world within 20 s"}
    assert play.given_up == [hanging]


def test_a_worker_that_has_said_its_error_is_given_up_after_ten_seconds() -> None:
    """It keeps its GPU; one that ends well takes the time that it needs."""
    play = later({"a": 1, "b": 1})
    one, two = play.world
    play.roster.last_word_received(one, LastWord(0), play.now)
    play.say(two, "training", step=20)
    play.wait(LEAVE_S)
    assert play.taken_out == {}
    play.wait(1)
    assert play.taken_out == {two: "it has not ended within 10 s"}
    assert play.given_up == [two]


def test_a_newcomer_whose_host_is_gone_is_ended() -> None:
    """Whether it builds or waits; it may leave by itself."""
    play = training({"a": 1})
    play.find({"a": 1, "b": 1, "c": 1})
    building, ready = play.started[1:]
    play.roster.rank_requested(ready, play.now)
    play.find({"a": 1})
    assert play.taken_out == dict.fromkeys((building, ready), "its host is no longer listed")
    assert play.given_up == []


def test_a_member_whose_host_is_gone_reads_why_it_has_no_rank() -> None:
    """It has left its world together with the others."""
    play = training({"a": 1, "b": 1})
    one, two = play.world
    play.find({"a": 1})
    play.ask(one, two)
    assert (play.taken_out, play.given_up) == ({two: "its host is no longer listed"}, [])
    assert play.roster.worlds_formed == 2


def test_a_worker_that_a_signal_ends_reads_for_how_long_its_slot_is_empty() -> None:
    """Whoever takes a machine away for a moment only is told what to do."""
    play = training({"a": 1, "b": 1})
    one, told = play.world
    play.tell_to_end(told)
    play.ask(one, told)
    expected = "it was told to end by a signal, so its host may be about to go; no worker is started in its slot for "
    assert play.taken_out == {told: f"{expected}5 minutes, unless the host is listed anew"}
    assert play.given_up == []


def test_a_job_that_is_over_ends_all_workers_and_says_why() -> None:
    """Those that cannot start, and a rank 0 that cannot go on, are named."""
    play = Play({"a": 1, "b": 1}, first=2)
    play.end(play.started[0], 2)
    assert play.finish == Finish(2, "a[0] cannot start")
    assert (play.taken_out, play.given_up) == ({play.started[1]: "the job is over"}, [])

    play = training({"a": 1, "b": 1})
    play.fail(play.world[0], "meeting", code=2)
    assert play.finish == Finish(2, "a[0], as rank 0, cannot go on")


def test_an_only_worker_that_nobody_could_mend_ends_the_job() -> None:
    """No member is left, and yet no new start is tried."""
    play = training({"a": 1})
    play.end(play.world[0], 4)
    assert play.finish == Finish(4, "a[0] ended with exit code 4")


def test_the_first_world_waits_for_a_minute_and_a_job_for_its_patience() -> None:
    """Counted from when there are too few: not a second less."""
    play = Play({"a": 1, "gone": 1}, first=2, begins_at=LATER)
    play.ask(play.started[0])
    play.wait(60)
    assert play.world == []
    play.wait(1)
    assert play.world == [play.started[0]]

    play = later({"a": 1, "b": 1}, fewest=2)
    one, two = play.world
    play.find({"a": 1})
    play.end(two, 1)
    play.ask(one)
    play.wait(600)
    assert play.finish is None
    play.wait(1)
    assert play.finish == Finish(TOO_FEW_WORKERS, "fewer than 2 workers for 600 s")


def test_a_worker_that_was_never_heard_of_is_no_hope() -> None:
    """Its host may be off: the patience counts from the start."""
    play = Play({"a": 1}, first=1)
    play.wait(600, *play.started)
    assert play.finish is None
    play.wait(1, *play.started)
    assert play.finish == Finish(TOO_FEW_WORKERS, "fewer than 1 workers for 600 s")


def test_a_job_says_until_when_it_waits_whenever_that_begins() -> None:
    """Ten minutes from now, and not from its start."""
    play = later({"a": 1, "b": 1}, fewest=2)
    one, two = play.world
    play.find({"a": 1})
    play.end(two, 255)
    play.ask(one)
    play.wait(5)
    (line,) = play.told
    assert "if there are fewer than 2 in 595 s, the job ends" in line


def test_slots_beyond_the_most_workers_are_none() -> None:
    """The job could not use them."""
    play = Play({"a": 9}, first=2, fewest=2, most=2)
    play.wait(60)
    assert play.told == ["waiting for workers: 0 of 2 are ready, 2 are starting; the hosts have 2 slots"]


def test_what_comes_from_a_worker_that_has_exited_is_no_news() -> None:
    """It was on its way when the process ended."""
    play = training({"a": 1, "b": 1})
    one, two = play.world
    play.end(two, 137)
    play.tell_to_end(two)
    play.say(two, "training", step=3)
    play.roster.heartbeat_received(two, play.now)
    play.miss(two)
    play.end(two, 4)
    assert (play.finish, play.taken_out, play.told) == (None, {}, [])
    play.ask(one)
    assert play.world == [one]


def test_a_worker_that_waits_while_others_fail_to_build_may_train() -> None:
    """It has been built: the error is not in the program."""
    play = Play({"good": 1, "bad": 1}, first=2, fewest=2)
    play.ask(play.newest("good"))
    for _ in range(5):
        play.fail(play.newest("bad"), "building")
        play.wait(20)
    assert play.finish is None


def test_a_worker_that_builds_for_minutes_may_get_further_than_others() -> None:
    """As long as it reports; where it has never been heard of, a minute is enough."""
    play = Play({"slow": 1, "bad": 1}, first=2)
    for _ in range(9):
        play.fail(play.newest("bad"), "building")
        play.wait(61)
    assert play.finish is None

    play = Play({}, first=2)
    play.wait(LATER)
    play.find({"silent": 1, "bad": 1})
    silent = play.newest("silent")
    while play.finish is None:
        if play.roster.worker(play.newest("bad")):
            play.fail(play.newest("bad"), "building")
        play.wait(1, silent)
    assert play.now == LATER + 60
