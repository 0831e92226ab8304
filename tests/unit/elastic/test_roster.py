"""Which workers a job starts, admits, awaits and evicts, which faults it
survives, and when it ends.
"""

import pytest

from hvd_train.elastic.roster import (
    COMMITTED,
    EMPTY_AFTER_SIGNAL_S,
    TOO_FEW_WORKERS,
    Finish,
    Worker,
)
from hvd_train.launch.exit_report import ExitReport
from tests.support.jobs import ONE, THREE, TWO, Play, training


def later(hosts: str, **limits: int) -> Play:
    """Return a job that has trained for a while."""
    play = training(hosts, **limits)
    play.wait(100)
    return play


def test_the_first_world_waits_for_all_workers_for_a_minute() -> None:
    play = Play("ab", first=2, begins_at=100.0)
    play.ask(ONE)
    play.wait(60)
    assert play.world == []
    play.wait(1)
    assert play.world == [ONE]


def test_a_newcomer_joins_when_it_is_ready() -> None:
    play = training("ab")
    play.find("abc")
    play.wait(60)
    assert play.roster.requested() == "train"
    play.ask(THREE)
    assert (play.world, play.roster.requested()) == ([ONE, TWO], "change")
    play.ask(ONE, TWO)
    assert (play.world, play.roster.requested()) == ([ONE, TWO, THREE], "train")


def test_a_host_that_keeps_failing_is_tried_at_growing_intervals() -> None:
    play = training("a")
    play.find("ab")
    for _ in range(4):
        play.end(play.newest("b"), 1)
        tried = len(play.started)
        while len(play.started) == tried:
            play.wait(1)
    assert play.now == 1 + 2 + 4 + 8
    assert (play.world, play.finish) == ([ONE], None)


@pytest.mark.parametrize("waiting", [False, True])
def test_after_a_pause_of_the_job_each_limit_starts_again(waiting: bool) -> None:
    """The driver may resume before the workers; also while members wait for others."""
    play = later("ab")
    play.ask(*((ONE,) if waiting else ()))
    play.now += 4000
    play.wait(2, TWO)
    play.ask(ONE, TWO)
    assert (play.world, play.evicted) == ([ONE, TWO], {})
    assert play.notices == ["the driver was paused for 4001 s: all time limits start again"]


@pytest.mark.parametrize(("rejoining", "seconds"), [(False, 10), (True, 3)])
def test_a_silent_worker_is_evicted(rejoining: bool, seconds: int) -> None:
    """Survivors that wait for it evict it sooner."""
    play = later("abc")
    play.ask(*((ONE, TWO) if rejoining else ()))
    play.wait(seconds, THREE)
    assert play.evicted == {}
    play.wait(1, THREE)
    assert (play.evicted, play.killed) == ({THREE: f"no heartbeat for {seconds + 1} s"}, [THREE])


def test_a_member_that_sends_heartbeats_but_hangs_is_evicted() -> None:
    """Each rendezvous has its own forty seconds."""
    play = later("ab")
    play.ask(ONE)
    play.wait(39)
    play.ask(TWO)
    assert (play.world, play.evicted) == ([ONE, TWO], {})
    play.wait(40)
    play.ask(ONE)
    play.wait(40)
    assert play.evicted == {}
    play.wait(1)
    assert play.evicted == {TWO: "it has not come to the new world within 40 s"}
    assert (play.killed, play.world) == ([TWO], [ONE])


def test_a_host_that_is_no_longer_listed_leaves_after_a_step() -> None:
    """Its member leaves after a step; its newcomers, building or ready, end at once."""
    play = training("ab")
    play.find("abcd")
    building, ready = play.started[2:]
    play.roster.rank_requested(ready, play.now)
    play.find("b")
    assert play.evicted == dict.fromkeys((building, ready), "its host is no longer listed")
    assert play.roster.requested() == "change"
    play.ask(ONE, TWO)
    assert play.world == [TWO]
    assert play.killed == []


def test_with_fewer_than_min_np_survivors_wait() -> None:
    """After the patience the job ends with 69."""
    play = later("ab", fewest=2)
    play.find("a")
    play.end(TWO, 1)
    play.ask(ONE)
    play.wait(30)
    assert play.notices == ["waiting for workers: 1 of 2 ready, 0 starting, 1 slots listed"]
    play.wait(570)
    assert play.finish is None
    play.wait(1)
    assert play.finish == Finish(TOO_FEW_WORKERS, "fewer than 2 workers for 600 s")


def test_the_job_is_done_when_its_last_world_is_done() -> None:
    """The job does not wait for an evicted process, but for members that train."""
    play = training("abc")
    play.wait(12, THREE)
    play.end(TWO, 0)
    play.ask(ONE)
    assert (play.world, play.finish) == ([ONE], None)
    play.end(ONE, 0)
    assert play.finish == Finish(0, "done")
    for code in COMMITTED:  # a signal to all workers, or a lost driver
        play = training("ab")
        for number in play.world:
            play.end(number, code)
        assert play.finish == Finish(code, "stopped, and committed")


@pytest.mark.parametrize("missed_the_end", [False, True])
@pytest.mark.parametrize("code", [137, None])
def test_a_worker_whose_training_has_ended_is_done_whatever_ends_its_process(
    code: int | None, missed_the_end: bool
) -> None:
    """Until then its code may run for hours: no rank waits for it, no worker starts,
    and the job does not end.
    """
    play = training("ab")
    play.say_ended(ONE)
    if missed_the_end:
        play.ask(TWO)
        assert play.world == [TWO]
    play.say_ended(TWO)
    play.end(TWO, 0)
    play.wait(4000)
    assert (play.evicted, play.finish, len(play.started)) == ({}, None, 2)
    if code is None:
        play.wait(12, ONE)  # its host is gone
    play.end(ONE, code or 255)  # of its ssh
    assert play.finish == Finish(0, "done")


def test_a_program_that_trains_again_is_not_done() -> None:
    play = training("a")
    play.say_ended(ONE)
    play.roster.exit_report_received(ONE, None, play.now)
    play.end(ONE, 137)
    play.wait(3)
    assert (play.finish, len(play.started)) == (None, 2)


def test_an_error_that_repeats_after_the_training_ends_the_job() -> None:
    play = training("a")
    for _ in range(3):
        assert play.finish is None
        play.say_ended(play.world[0])
        play.end(play.world[0], 1)
        play.wait(60)
        play.ask(play.started[-1])
    assert play.finish == Finish(5, "3 workers in a row ended with an error in step 21 (see above)")


def test_a_step_that_hangs_repeatedly_ends_the_job() -> None:
    """The others leave it after a time limit. All workers that do not come are one error."""
    play = training("abc")
    for _ in range(3):
        assert play.finish is None
        one, *hanging = play.world
        play.roster.world_left(one, 20, "")
        play.ask(one)
        play.wait(41)
        for number in hanging:
            play.end(number, 137)
        play.wait(60)
        play.ask(*play.started[-2:], one)
    assert play.finish == Finish(5, "3 workers in a row ended with an error in step 21 (see above)")


@pytest.mark.parametrize(
    ("earlier", "code"), [("", 137), ("", 0), ("evicted", 143), ("signalled", 143)]
)
def test_if_all_members_die_new_workers_resume_from_the_last_commit(
    earlier: str, code: int
) -> None:
    """Rank 0 decides; a rank that left with 0, or was evicted and stopped, does
    not make the job a success.
    """
    play = training("ab")
    if earlier == "evicted":
        play.wait(12, TWO)
    if earlier == "signalled":
        play.signal(TWO)
        play.ask(TWO)
    play.end(TWO, code)
    play.end(ONE, 137)
    assert play.finish is None
    play.wait(3)
    play.ask(*play.started[2:])
    assert play.world == play.started[2:]


def test_an_error_that_no_new_worker_would_survive_ends_the_job_at_once() -> None:
    play = Play("ab", first=2)
    play.end(ONE, 2)
    assert play.finish == Finish(2, "a[0] ended with exit code 2")
    for code in (5, 6, 74):
        play = training("ab")
        play.end(TWO, code)
        assert play.finish == Finish(code, f"b[0] ended with exit code {code}")
        assert list(play.evicted) == [ONE]


def test_ranks_with_different_weights_resume_once_without_the_host_that_is_wrong() -> None:
    play = training("abbc")
    for number in play.world:
        is_odd = play.hosts[number] == "b"
        report = ExitReport(4, "ranks hold other weights", "training", 7, avoids_host=is_odd)
        play.roster.exit_report_received(number, report, play.now)
        play.end(number, 4)
    before = len(play.started)
    play.wait(100)
    new = play.started[before:]
    assert {play.hosts[number] for number in new} == {"a", "c"}
    play.ask(*new)
    assert (play.world, play.finish) == (new, None)
    play.end(new[0], 4)
    assert play.finish == Finish(4, "ranks differed again (see above)")


def test_a_job_that_needs_the_host_that_is_wrong_ends() -> None:
    play = training("aaa")
    report = ExitReport(4, "weights differ", "training", 7, avoids_host=True)
    play.roster.exit_report_received(TWO, report, play.now)
    play.end(TWO, 4)
    assert play.finish == Finish(4, "a[1] differed from the others (see above)")


def test_a_typo_in_the_model_ends_the_job() -> None:
    play = Play("ab", first=2)
    play.fail(ONE, "building")
    play.fail(TWO, "building")
    play.wait(2)
    assert play.finish is None
    play.fail(THREE, "building")
    assert play.finish == Finish(
        5, "3 workers in a row ended with an error before the ranks connected (see above)"
    )


def test_one_bad_host_does_not_end_the_job() -> None:
    """The fault may be in the host while a worker elsewhere builds, is ready or trains."""
    play = Play("ab", first=2)
    for attempt in range(8):
        if attempt == 4:
            assert play.finish is None
            play.ask(play.newest("a"))
            play.wait(70)
            assert play.world == [play.newest("a")]
        play.fail(play.newest("b"), "building")
        play.wait(61)
    assert play.finish is None


def test_an_error_of_three_workers_at_one_step_ends_the_job() -> None:
    """A damaged image fails each worker that takes the step or prefetches it."""
    play = training("ab")
    play.fail(TWO, "training", step=20, code=2)
    play.ask(ONE)
    play.fail(ONE, "training", step=19, code=2)
    play.wait(3)
    assert play.finish is None
    play.ask(*play.started[2:])
    play.fail(play.world[1], "training", step=20, code=2)
    assert play.finish == Finish(2, "3 workers in a row ended with an error in step 21 (see above)")


def test_errors_at_different_steps_and_deaths_are_survived() -> None:
    play = training("ab")
    for step, code in [
        *((step, 1) for step in (5, 9, 5, 7, 5, 9)),
        *((0, code) for code in (137, 139, 255, 137, 255)),
    ]:
        if step:
            play.say(play.world[1], "training", step)
        play.end(play.world[1], code)
        play.ask(play.world[0])
        play.wait(60)
        play.ask(play.started[-1], play.world[0])
    assert play.finish is None


def test_a_crash_at_exit_hides_no_exit_code() -> None:
    """The exit report counts if a crash or ssh replaced the exit code;
    otherwise the exit code counts.
    """
    for word, exit_code, meant in (
        (ExitReport(143), -6, 143),
        (ExitReport(0), 255, 0),
        (ExitReport(0), 1, 1),
        (ExitReport(1, "Traceback"), 0, 1),
    ):
        assert Worker(1000, "a", 2, 0.0, 0.0, exit_report=word).meant_exit_code(exit_code) == meant


def test_a_worker_that_gets_a_signal_leaves_and_the_others_continue() -> None:
    """Its exit code does not become the exit code of the job."""
    play = training("abc")
    play.signal(TWO)
    assert play.roster.requested() == "change"
    assert not play.evicted
    play.ask(TWO)
    assert (list(play.evicted), play.killed) == ([TWO], [])
    play.end(TWO, 143)
    play.ask(ONE, THREE)
    assert (play.world, play.finish) == ([ONE, THREE], None)


@pytest.mark.parametrize("ssh_ends", ["before the report", "after the report"])
@pytest.mark.parametrize("listed_again", [False, True])
def test_the_slot_of_a_worker_that_got_a_signal_stays_empty_for_minutes(
    listed_again: bool, ssh_ends: str
) -> None:
    """A shutdown of the host sends the signal to its sshd as well."""
    play = training("ab")
    if ssh_ends == "before the report":
        play.end(TWO, 255)
    play.signal(TWO)
    play.end(TWO, 255)
    play.ask(ONE)
    play.wait(EMPTY_AFTER_SIGNAL_S - 2)
    assert (len(play.started), play.world) == (2, [ONE])
    if listed_again:
        play.find("a")
        play.find("ab")
    else:
        play.wait(3)
    assert len(play.started) == 3


@pytest.mark.parametrize("together", [True, False])
def test_if_all_workers_get_a_signal_the_job_stops(together: bool) -> None:
    play = training("ab")
    play.signal(ONE)
    if not together:
        play.ask(ONE, TWO)
    play.signal(TWO)
    assert play.roster.requested() == "stop"
    play.end(ONE, 143)
    play.end(TWO, 143)
    assert play.finish == Finish(143, "stopped, and committed")


def test_the_next_world_forms_without_newcomers_that_cannot_connect() -> None:
    """Their hosts stay unused, with all slots, until the list changes for them."""
    play = training("ab")
    play.find("abff")
    play.ask(THREE, ONE, TWO)
    assert play.world == [ONE, TWO, THREE]
    play.miss(ONE, TWO, THREE)
    assert play.world == [ONE, TWO]
    assert [play.hosts[number] for number in play.evicted] == ["f", "f"]
    assert play.notices[0].startswith(
        "ranks could not connect to the newcomers on f (connection refused); "
    )
    for number in play.evicted:
        play.end(number, 0)
    play.wait(4000)
    assert len(play.started) == 4
    play.find("abf")
    assert [play.hosts[number] for number in play.started[4:]] == ["f"]


def test_survivors_that_cannot_connect_three_times_end_the_job() -> None:
    """They wait for a rank then, and commit when they get none."""
    play = training("abb")
    members = [ONE, TWO, THREE]
    for attempt in (1, 2, 3):
        assert play.finish is None
        play.miss(*members)
        assert f"connect to each other (attempt {attempt} of 3, on a:1,b:2)" in play.notices[-1]
    expected = (
        "ranks could not connect to each other 3 times in a row; `hvd-train doctor -H "
        "a:1,b:2` examines them"
    )
    assert play.finish == Finish(5, expected)
    assert (play.started, list(play.evicted), play.killed) == (members, members, [])
