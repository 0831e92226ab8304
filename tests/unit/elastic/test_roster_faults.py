"""Errors, signals and failed rendezvous: which of them end a job, and how it survives the others."""

import pytest

from hvd_train.elastic.roster import EMPTY_AFTER_SIGNAL_S, Finish
from hvd_train.elastic.worker import Worker
from hvd_train.launch.exit_report import ExitReport
from tests.support.jobs import Play, training


def test_wrong_settings_end_the_job_at_once() -> None:
    play = Play({"a": 1, "b": 1}, first=2)
    play.end(play.started[0], 2)
    assert play.finish == Finish(2, "a[0] cannot start")
    assert (play.evicted, play.killed) == ({play.started[1]: "the job is over"}, [])


@pytest.mark.parametrize("code", [4, 5, 6, 74])
def test_an_error_that_no_new_worker_would_survive_ends_the_job_at_once(code: int) -> None:
    play = training({"a": 1, "b": 1})
    one, two = play.world
    play.end(two, code)
    assert play.finish == Finish(code, f"b[0] ended with exit code {code}")
    assert list(play.evicted) == [one]


def test_a_typo_in_the_model_ends_the_job() -> None:
    play = Play({"a": 1, "b": 1}, first=2)
    for number in play.started[:2]:
        play.fail(number, "building")
    play.wait(2)
    assert play.finish is None
    play.fail(play.started[2], "building")
    assert play.finish == Finish(5, "3 workers in a row ended with an error before the ranks met (see above)")


def test_one_bad_host_does_not_end_the_job() -> None:
    """The fault may be in the host while a worker elsewhere builds, is ready or trains."""
    play = Play({"good": 1, "bad": 1}, first=2)
    for attempt in range(8):
        if attempt == 4:
            assert play.finish is None
            play.ask(play.newest("good"))
            play.wait(70)
            assert play.world == [play.newest("good")]
        play.fail(play.newest("bad"), "building")
        play.wait(61)
    assert play.finish is None


@pytest.mark.parametrize("steps", [(20, 20, 20), (20, 19, 20)])
def test_an_error_of_three_workers_at_one_step_ends_the_job(steps: tuple[int, int, int]) -> None:
    """A damaged image fails each worker that takes the step or prefetches it."""
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


def test_errors_at_different_steps_and_deaths_are_survived() -> None:
    play = training({"a": 1, "b": 1})
    for step, code in [*((step, 1) for step in (5, 9, 5, 7, 5, 9)), *((0, code) for code in (137, 139, 255, 137, 255))]:
        if step:
            play.say(play.world[1], "training", step)
        play.end(play.world[1], code)
        play.ask(play.world[0])
        play.wait(60)
        play.ask(play.started[-1], play.world[0])
    assert play.finish is None


def test_a_crash_at_exit_hides_no_exit_code() -> None:
    """The exit report counts if a crash or ssh replaced the exit code; otherwise the exit code counts."""
    for word, exit_code, meant in (
        (ExitReport(143), -6, 143),
        (ExitReport(0), 255, 0),
        (ExitReport(0), 1, 1),
        (ExitReport(1, "Traceback"), 0, 1),
    ):
        assert Worker(1000, "a", 2, 0.0, 0.0, exit_report=word).meant_exit_code(exit_code) == meant


def test_a_worker_that_gets_a_signal_leaves_and_the_others_continue() -> None:
    """Its exit code does not become the exit code of the job."""
    play = training({"a": 1, "b": 1, "c": 1})
    one, signalled, three = play.world
    play.signal(signalled)
    assert play.roster.wants_change()
    assert not play.roster.wants_stop()
    assert not play.evicted
    play.ask(signalled)
    assert (list(play.evicted), play.killed) == ([signalled], [])
    play.end(signalled, 143)
    play.ask(one, three)
    assert (play.world, play.finish) == ([one, three], None)
    play.end(one, 0)
    play.end(three, 0)
    assert play.finish == Finish(0, "done")


@pytest.mark.parametrize("ssh_ends", ["before the report", "after the report"])
@pytest.mark.parametrize("listed_again", [False, True])
def test_the_slot_of_a_worker_that_got_a_signal_stays_empty_for_minutes(listed_again: bool, ssh_ends: str) -> None:
    """A shutdown of the host sends the signal to its sshd as well."""
    play = training({"a": 1, "b": 1})
    one, signalled = play.world
    if ssh_ends == "before the report":
        play.end(signalled, 255)
    play.signal(signalled)
    play.end(signalled, 255)
    play.ask(one)
    assert ["it got a signal" in line for line in [*play.notices, *play.evicted.values()]] == [True]
    play.wait(EMPTY_AFTER_SIGNAL_S - 2)
    assert (len(play.started), play.world) == (2, [one])
    if listed_again:
        play.find({"a": 1})
        play.find({"a": 1, "b": 1})
    else:
        play.wait(3)
    assert len(play.started) == 3


@pytest.mark.parametrize("history", ["together", "one after another", "a fault comes first"])
def test_if_all_workers_get_a_signal_the_job_stops(history: str) -> None:
    play = training({"a": 1, "b": 1})
    one, two = play.world
    if history == "one after another":
        play.signal(one)
        play.ask(one, two)
        assert play.world == [two]
        play.signal(two)
    else:
        play.signal(one, two)
    assert play.roster.wants_stop()
    if history == "a fault comes first":
        play.ask(one, two)
        assert sorted(play.evicted) == [one, two]
    play.end(one, 143)
    play.end(two, 143)
    assert play.finish == Finish(143, "stopped, and committed")


def test_the_next_world_forms_without_newcomers_that_cannot_connect() -> None:
    """Their hosts stay unused, with all slots, until the list changes for them."""
    play = training({"a": 1, "b": 1})
    old = play.world
    play.find({"a": 1, "b": 1, "far": 2})
    far = play.started[2]
    play.ask(far, *old)
    assert play.world == [*old, far]
    play.miss(*old, far)
    assert play.world == old
    assert [play.hosts[number] for number in play.evicted] == ["far", "far"]
    assert play.notices[0].startswith("ranks could not connect to the newcomers on far (connection refused); ")
    for number in play.evicted:
        play.end(number, 0)
    play.wait(4000)
    assert len(play.started) == 4
    play.find({"a": 1, "b": 1, "far": 1})
    assert [play.hosts[number] for number in play.started[4:]] == ["far"]


def test_survivors_that_cannot_connect_three_times_commit_and_the_job_ends() -> None:
    play = training({"a": 1, "b": 2})
    members = play.world
    for attempt in (1, 2, 3):
        assert not play.roster.wants_stop()
        play.miss(*members)
        assert f"connect to each other (attempt {attempt} of 3, on a:1,b:2)" in play.notices[-1]
    assert play.roster.wants_stop()
    assert (play.finish, play.evicted) == (None, {})
    for number in members:
        assert play.finish is None
        play.fail(number, "training", code=3)
    expected = "ranks could not connect to each other 3 times in a row; `hvd-train doctor -H a:1,b:2` names the pairs"
    assert play.finish == Finish(5, f"{expected} of hosts that cannot connect")
    assert play.started == members
