"""Ranks that cannot meet though all of them live: who is left out of the next world, and when it may come back."""

from __future__ import annotations

import pytest

from tests.support.roster_play import training


def test_a_newcomer_with_which_nobody_can_meet_is_left_out_for_ever_longer() -> None:
    """Its link may be too slow, or a firewall in the way; the others train on, and it may try again later."""
    play = training({"a": 1, "b": 1})
    old = play.world
    play.find({"a": 1, "b": 1, "far": 1})
    waits = []
    for attempts in (3, 1, 1):
        far = play.newest("far")
        play.ask(far)
        play.ask(*old)
        for _ in range(attempts):
            assert play.world == [*old, far]
            play.miss(*old, far)
        assert play.world == old
        often = ", 3 times in a row" if attempts == 3 else ""
        seconds = 60 * 2 ** len(waits)
        reason = f"the ranks have not met with it{often}; it is tried again in {seconds} s"
        assert play.taken_out[far] == reason
        play.end(far, 143)
        begun = play.now
        while play.newest("far") == far:
            play.wait(1)
        waits.append(play.now - begun)
    assert waits == [60, 120, 240]
    assert play.told[0] == "the ranks have not met: connection refused"
    assert play.told[2] == "the ranks have not met, 3 times in a row: connection refused"


def test_a_death_explains_why_ranks_have_not_met() -> None:
    """Nobody else is left out for it, however often it happens."""
    play = training({"a": 1, "b": 1, "c": 1})
    one, two, _ = play.world
    for _ in range(6):
        play.end(play.world[2], 137)
        play.miss(one, two)
        assert play.world == [one, two]
        play.wait(60)
        play.ask(play.newest("c"))
        play.ask(one, two)
        assert play.world == [one, two, play.newest("c")]
    assert not play.taken_out
    assert not play.told


@pytest.mark.parametrize("have_met", [False, True])
def test_where_nobody_is_new_the_last_rank_is_left_out(have_met: bool) -> None:
    """Two hosts may have lost the way to each other, also after hours of training; what remains trains on."""
    play = training({"a": 1, "b": 1, "c": 1})
    if have_met:
        play.ask(*play.world)
    for _ in range(3):
        play.miss(*play.world)
    assert len(play.world) == 2
    play.miss(*play.world)
    assert len(play.world) == 1
    play.miss(*play.world)
    assert len(play.world) == 1


def test_those_left_out_come_back_one_at_a_time() -> None:
    """So the one that is to blame is alone when it fails again."""
    play = training({"a": 1})
    old = play.world
    play.find({"a": 1, "good": 1, "far": 1})
    play.ask(play.newest("good"), play.newest("far"))
    play.ask(*old)
    assert len(play.world) == 3
    for _ in range(3):
        play.miss(*play.world)
    assert play.world == old
    for number in (play.newest("good"), play.newest("far")):
        play.end(number, 143)
    play.wait(61)
    play.ask(play.newest("good"), play.newest("far"))
    play.ask(*old)
    assert play.world == [*old, play.newest("good")]
    play.ask(*play.world)
    assert len(play.world) == 3
    play.miss(*play.world)
    assert play.world == [*old, play.newest("good")]


def test_only_failures_in_a_row_count() -> None:
    """A meeting that comes about in between clears everybody, those that were left out as well."""
    play = training({"a": 1, "b": 1})
    old = play.world
    for _ in range(3):
        play.miss(*old)
        play.miss(*old)
        play.ask(*old)
        assert (play.world, play.taken_out) == (old, {})

    play.find({"a": 1, "b": 1, "far": 1})
    play.ask(play.newest("far"))
    play.ask(*old)
    for _ in range(3):
        play.miss(*play.world)
    play.end(play.newest("far"), 143)
    play.wait(61)
    play.ask(play.newest("far"))
    play.ask(*old)
    everybody = [*old, play.newest("far")]
    play.ask(*everybody)
    play.miss(*everybody)
    assert play.world == everybody
    play.end(play.newest("far"), 137)
    play.ask(*old)
    play.wait(2)
    play.ask(play.newest("far"))
    play.ask(*old)
    play.miss(*old, play.newest("far"))
    assert play.world == [*old, play.newest("far")], "its successor in the slot is no longer on trial"


def test_rank_0_says_why_the_ranks_have_not_met() -> None:
    """One reason is enough for a line; the others are mostly that the first has left."""
    play = training({"a": 1, "b": 1})
    one, two = play.world
    play.roster.not_met(two, "the other one has left")
    play.miss(one, why="no route to host")
    play.ask(two)
    assert play.told == ["the ranks have not met: no route to host"]


def test_a_newcomer_that_has_met_begins_anew() -> None:
    """It was left out long ago: a link that has been good since is as good as any other."""
    play = training({"a": 1, "b": 1})
    old = play.world
    play.find({"a": 1, "b": 1, "far": 1})
    waits = []
    for _ in range(2):
        far = play.newest("far")
        play.ask(far)
        play.ask(*old)
        for _ in range(3):
            play.miss(*old, far)
        assert play.world == old
        play.end(far, 143)
        begun = play.now
        while play.newest("far") == far:
            play.wait(1)
        waits.append(play.now - begun)
        far = play.newest("far")
        play.ask(far)
        play.ask(*old)
        play.ask(*old, far)
        play.end(far, 137)
        play.ask(*old)
        play.wait(60)
    assert waits == [60, 60]


def test_a_failure_that_was_a_newcomers_does_not_count_for_the_others() -> None:
    """They have three failures of their own before one of them is left out."""
    play = training({"a": 1, "b": 1})
    old = play.world
    play.find({"a": 1, "b": 1, "far": 1})
    for attempts in (3, 1):
        far = play.newest("far")
        play.ask(far)
        play.ask(*old)
        for _ in range(attempts):
            play.miss(*old, far)
        assert play.world == old
        play.end(far, 143)
        play.wait(61)
    play.miss(*old)
    play.miss(*old)
    assert play.world == old
    play.miss(*old)
    assert play.world == old[:1]


def test_a_rank_that_cannot_even_meet_itself_ends_the_job() -> None:
    """Whoever may have been to blame is left out by then: it is this host, which one line names with what to type."""
    play = training({"a": 2})
    while play.finish is None:
        assert len(play.told) < 20
        play.miss(*play.world)
    assert play.finish.exit_code == 5
    reason = "the ranks have not met, 10 times in a row: connection refused; type `hvd-train doctor` on a"
    assert play.finish.reason == reason
