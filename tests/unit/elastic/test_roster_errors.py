"""Errors that end workers: which end the job, and which the others survive."""

from __future__ import annotations

import pytest

from hvd_train.elastic.roster import LEAVE_S, SILENT_S, Finish
from hvd_train.elastic.worker import UNRECOVERABLE
from hvd_train.launch.last_word import LastWord
from tests.support.roster_play import Play, training


def test_wrong_settings_end_the_job_at_once() -> None:
    """They are wrong on every host."""
    play = Play({"a": 1, "b": 1}, first=2)
    play.end(play.started[0], 2)
    assert play.finish is not None
    assert play.finish.exit_code == 2
    assert list(play.taken_out) == [play.started[1]]


@pytest.mark.parametrize("code", UNRECOVERABLE)
def test_what_no_other_worker_would_mend_ends_the_job_at_once(code: int) -> None:
    """With the exit code that says what it is; the others are not left to find out by themselves."""
    play = training({"a": 1, "b": 1})
    one, two = play.world
    play.end(two, code)
    assert play.finish == Finish(code, f"b[0] ended with exit code {code}")
    assert list(play.taken_out) == [one]


def test_other_settings_in_the_run_folder_end_the_job() -> None:
    """Rank 0 finds them when the ranks meet, and no other rank 0 would fare better; a newcomer's own are its own."""
    play = training({"a": 1, "b": 1})
    one, two = play.world
    play.fail(two, "meeting", code=2)
    assert play.finish is None
    play.fail(one, "meeting", code=2)
    assert play.finish is not None
    assert play.finish.exit_code == 2


def test_a_typo_in_the_model_ends_the_job() -> None:
    """Each worker meets it before the first step: after three nobody needs to see it once more."""
    play = Play({"a": 1, "b": 1}, first=2)
    play.fail(play.started[0], "building")
    play.fail(play.started[1], "building")
    play.wait(2)
    assert play.finish is None
    play.fail(play.started[2], "building")
    assert play.finish == Finish(5, "3 workers in a row ended with an error before the ranks met (see above)")


def test_one_bad_host_does_not_end_the_job() -> None:
    """While a worker elsewhere has built, or is building for the first time, the error may be in the host."""
    play = Play({"good": 1, "bad": 1}, first=2)
    for _ in range(4):
        play.fail(play.newest("bad"), "building")
        play.wait(9)
    assert play.finish is None
    play.ask(play.newest("good"))
    play.wait(70)
    assert play.world == [play.newest("good")]
    for _ in range(4):
        play.fail(play.newest("bad"), "building")
        play.wait(61)
    assert play.finish is None


def test_a_host_that_says_nothing_does_not_hold_the_end_up() -> None:
    """Its ssh may hang for ever."""
    play = Play({"silent": 1, "bad": 1}, first=2)
    silent = play.newest("silent")
    for _ in range(4):
        play.fail(play.newest("bad"), "building")
        play.wait(9, silent)
    assert play.finish is None
    play.wait(30, silent)
    assert play.finish is not None


@pytest.mark.parametrize("steps", [(20, 20, 20), (20, 19, 20)])
def test_a_torn_picture_kills_three_workers_and_then_the_job(steps: tuple[int, int, int]) -> None:
    """Whoever takes the step meets it, in the step before where it reads ahead, also after the last commit."""
    play = training({"a": 1, "b": 1})
    one, two = play.world
    play.fail(two, "training", step=steps[0], code=2)
    play.ask(one)
    play.fail(one, "training", step=steps[1], code=2)
    play.wait(3)
    assert play.finish is None
    play.ask(*play.started[2:])
    play.fail(play.world[1], "training", step=steps[2], code=2)
    assert play.finish == Finish(2, "3 workers in a row ended with an error in step 21 (see above)")


def test_an_error_counts_where_it_was_though_the_others_have_formed_a_world_since() -> None:
    """They need not wait for the end of the process: each of three workers is in a later world when one's has ended."""
    play = training({"a": 1, "b": 1})
    one, two = play.world
    play.say(two, "training", step=20, code=2)
    play.ask(one)
    assert play.world == [one]
    play.end(two, 2)
    play.wait(9)
    third = play.started[-1]
    play.ask(third)
    play.say(one, "training", step=20, code=2)
    assert play.world == [third]
    play.end(one, 2)
    assert play.finish is None
    play.fail(third, "training", step=20, code=2)
    assert play.finish == Finish(2, "3 workers in a row ended with an error in step 21 (see above)")


def test_a_rank_0_that_cannot_go_on_ends_the_job_though_the_others_have_formed_a_world_since() -> None:
    """It was rank 0 of the world in which it found the run folder with other settings."""
    play = training({"a": 1, "b": 1})
    one, two = play.world
    play.say(one, "meeting", code=2)
    play.ask(two)
    assert play.world == [two]
    play.end(one, 2)
    assert play.finish is not None
    assert play.finish.exit_code == 2


def test_errors_at_different_steps_are_survived() -> None:
    """And so are deaths by a signal, at whatever step, and the end of an ssh."""
    play = training({"a": 1, "b": 1})
    for step in (5, 9, 5, 7, 5, 9):
        play.fail(play.world[1], "training", step=step)
        play.ask(play.world[0])
        play.wait(60)
        play.ask(play.started[-1], play.world[0])
    for code in (137, 139, 255, 137, 255):
        play.end(play.world[1], code)
        play.ask(play.world[0])
        play.wait(60)
        play.ask(play.started[-1], play.world[0])
    assert play.finish is None


def test_an_error_frees_the_others_before_the_process_has_ended() -> None:
    """A process may take seconds to end; one that does not end is ended."""
    play = training({"a": 1, "b": 1})
    one, two = play.world
    play.roster.last_word_received(two, LastWord(1, "Traceback", "training", 20), play.now)
    play.ask(one)
    assert play.world == [one]
    play.wait(LEAVE_S)
    assert not play.taken_out
    play.wait(1)
    assert "has not ended" in play.taken_out[two]


def test_the_last_word_of_a_worker_that_is_taken_out_changes_nothing() -> None:
    """It has been told to end already, and is not told again."""
    play = training({"a": 1, "b": 1})
    two = play.world[1]
    play.wait(SILENT_S + 2, two)
    reason = play.taken_out[two]
    play.roster.last_word_received(two, LastWord(1, "Traceback", "training", 20), play.now)
    play.wait(LEAVE_S + 2, two)
    assert play.taken_out == {two: reason}


def test_a_crash_in_an_exit_handler_is_no_fault() -> None:
    """All is written, and rank 0 has said so: 139 from a library at exit must not start the job anew."""
    play = training({"a": 1, "b": 1})
    one, two = play.world
    for number in (one, two):
        play.roster.last_word_received(number, LastWord(0), play.now)
    assert play.world == [one, two]
    play.end(two, 134)
    play.end(one, 139)
    assert play.finish == Finish(0, "done")


def test_a_commit_counts_though_the_process_crashes_at_exit() -> None:
    """It was stopped by SIGTERM, and said that all is committed."""
    play = training({"a": 1})
    play.roster.last_word_received(play.world[0], LastWord(143), play.now)
    play.end(play.world[0], 139)
    assert play.finish == Finish(143, "stopped, and committed")
