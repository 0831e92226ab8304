"""Workers that a signal tells to end: their hosts are about to go, and the others go on."""

from __future__ import annotations

from hvd_train.elastic.roster import TOLD_TO_END_S, Finish
from hvd_train.elastic.worker import STOPPED
from tests.support.roster_play import Play, training


def test_a_worker_that_is_told_to_end_leaves_and_the_others_go_on() -> None:
    """It is out when it has left its world, waits for nobody, and its exit code does not speak for the job."""
    play = training({"a": 1, "b": 1, "c": 1})
    one, told, three = play.world
    play.tell_to_end(told)
    assert play.roster.wants_change()
    assert not play.roster.wants_stop()
    assert not play.taken_out, "it leaves after a step, together with the others"
    play.ask(told)
    assert play.taken_out[told].startswith("it was told to end by a signal")
    play.end(told, 143)
    play.ask(one, three)
    assert (play.world, play.finish) == ([one, three], None)
    play.end(one, 0)
    play.end(three, 0)
    assert play.finish == Finish(0, "done")


def test_the_slot_of_a_worker_that_was_told_to_end_stays_empty() -> None:
    """A spot host is about to go. One that is still there after minutes, or is listed anew, gets a worker."""
    for listed_anew in (False, True):
        play = training({"a": 1, "b": 1})
        one, told = play.world
        play.tell_to_end(told)
        play.ask(one, told)
        play.end(told, 143)
        play.wait(TOLD_TO_END_S - 2)
        assert (len(play.started), play.world) == (2, [one])
        if listed_anew:
            play.find({"a": 1})
            play.find({"a": 1, "b": 1})
        else:
            play.wait(3)
        assert len(play.started) == 3


def test_a_newcomer_that_a_signal_ends_is_not_replaced_at_once() -> None:
    """It may have had no time to say that it was told to end."""
    for code in STOPPED:
        play = training({"a": 1})
        play.find({"a": 1, "b": 1})
        play.end(play.started[-1], code)
        play.wait(TOLD_TO_END_S / 2)
        assert len(play.started) == 2


def test_with_too_few_left_the_others_wait_for_a_new_host() -> None:
    """The one that is told to end does not wait with them: its host goes."""
    play = training({"a": 1, "b": 1}, fewest=2)
    one, told = play.world
    play.tell_to_end(told)
    assert play.roster.wants_change()
    play.ask(one, told)
    assert list(play.taken_out) == [told]
    assert play.world == [one, told], "no new world yet"
    play.end(told, 143)
    play.find({"a": 1, "c": 1})
    play.ask(play.started[-1])
    assert play.world == [one, play.started[-1]]
    assert play.finish is None


def stops(play: Play, *workers: int) -> None:
    """Workers end by a signal, and with the last of them the job, as one that has committed."""
    for worker in workers:
        play.end(worker, 143)
    assert play.finish == Finish(143, "stopped, and committed")


def test_where_all_are_told_to_end_so_does_the_job() -> None:
    """They stop together and commit; the exit code is that of a stop, also where some have left before."""
    play = training({"a": 1, "b": 1})
    one, two = play.world
    play.tell_to_end(one, two)
    assert play.roster.wants_stop()
    stops(play, one, two)

    play = training({"a": 1, "b": 1})
    one, two = play.world
    play.tell_to_end(one)
    play.ask(one, two)
    assert play.world == [two]
    play.tell_to_end(two)
    assert play.roster.wants_stop()
    stops(play, one, two)

    play = training({"a": 1, "b": 1})
    one, two = play.world
    play.tell_to_end(one, two)
    play.ask(one, two)  # a fault has come before the stop
    assert sorted(play.taken_out) == [one, two]
    stops(play, one, two)


def test_one_that_dies_while_another_leaves_does_not_end_the_job() -> None:
    """The commit of the one that left is what new workers go on from."""
    play = training({"a": 1, "b": 1})
    one, told = play.world
    play.tell_to_end(told)
    play.ask(told)
    play.end(told, 143)
    play.end(one, 137)
    assert play.finish is None
    play.wait(3)
    play.ask(play.started[-1])
    assert play.world == [play.started[-1]]
