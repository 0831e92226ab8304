"""Who is started, let in, waited for and given up: histories of an elastic job, played on a clock of the test's."""

from __future__ import annotations

from hvd_train.elastic.roster import (
    LONGEST_BACK_OFF_S,
    REPORT_S,
    SILENT_S,
    SILENT_WHILE_MEETING_S,
    STEADY_S,
    TOO_FEW_WORKERS,
    Finish,
)
from hvd_train.elastic.worker import COMMITTED, UNTRUSTED
from tests.support.roster_play import Play, training


def test_the_first_world_waits_for_all() -> None:
    """Workers that are ready wait for those that still import."""
    play = Play({"a": 2, "b": 1}, first=3)
    one, two, three = play.started
    play.ask(one, three)
    assert play.world == []
    assert not play.roster.wants_change(), "nobody is there who could"
    assert not play.roster.wants_stop()
    play.ask(two)
    assert play.world == [one, two, three] or sorted(play.world) == sorted(play.started)


def test_the_first_world_does_not_wait_for_ever() -> None:
    """A host that cannot be reached delays the start by a minute, where --min-np allows it."""
    play = Play({"a": 1, "gone": 1}, first=2)
    play.ask(play.started[0])
    play.wait(50)
    assert play.world == []
    play.wait(20)
    assert play.world == [play.started[0]]


def test_a_newcomer_is_let_in_when_it_is_ready() -> None:
    """While it imports nobody waits; then the members are asked to come together, and keep their ranks."""
    play = training({"a": 1, "b": 1})
    old = play.world
    play.find({"a": 1, "b": 1, "c": 1})
    new = play.started[-1]
    play.wait(60)
    assert not play.roster.wants_change()
    play.ask(new)
    assert play.roster.wants_change()
    assert play.world == old
    play.ask(*old)
    assert play.world == [*old, new]
    assert not play.roster.wants_change()


def test_survivors_go_on_at_once_and_the_slot_is_filled_later() -> None:
    """One crash bars no host (Horovod's own driver does): a new worker starts there and joins when it is ready."""
    play = training({"a": 1, "b": 1})
    one, two = play.world
    play.end(two, 137)
    play.ask(one)
    assert play.world == [one]
    play.wait(2)
    assert len(play.started) == 3
    play.ask(play.started[-1])
    play.ask(one)
    assert play.world == [one, play.started[-1]]


def test_a_worker_that_cannot_start_is_tried_ever_more_seldom() -> None:
    """A flapping host costs the others nothing and is not given up."""
    play = training({"a": 1})
    play.find({"a": 1, "bad": 1})
    for _ in range(4):
        play.end(play.started[-1], 1)
        tried = len(play.started)
        while len(play.started) == tried:
            play.wait(1)
    assert play.now == 1 + 2 + 4 + 8
    assert len(play.world) == 1


def test_the_silent_one_is_taken_out_when_the_others_meet() -> None:
    """Survivors of a silent host wait for it for seconds only."""
    play = training({"a": 1, "b": 1, "c": 1})
    one, two, silent = play.world
    play.wait(SILENT_WHILE_MEETING_S - 1, silent)
    play.ask(one, two)
    assert silent not in play.taken_out
    play.wait(2, silent)
    assert "nothing was heard" in play.taken_out[silent]
    assert play.world == [one, two]


def test_a_stopped_worker_is_noticed_by_itself() -> None:
    """Also where the others do not miss it."""
    play = training({"a": 1, "b": 1})
    play.wait(SILENT_S - 1, play.world[1])
    assert not play.taken_out, "a network may be away for seconds"
    play.wait(3, play.world[1])
    assert list(play.taken_out) == [play.world[1]]


def test_one_that_hangs_but_lives_is_taken_out() -> None:
    """It says that it lives, but does not come."""
    play = training({"a": 1, "b": 1})
    one, hanging = play.world
    play.ask(one)
    play.wait(REPORT_S + 2)
    assert "has not come" in play.taken_out[hanging]
    assert play.world == [one]


def test_a_host_taken_from_the_list_leaves_at_a_steps_end() -> None:
    """Its worker is no member of the next world, and nobody else is disturbed."""
    play = training({"a": 1, "b": 1})
    one, two = play.world
    play.find({"b": 1})
    assert play.roster.wants_change()
    assert not play.taken_out
    play.ask(one, two)
    assert play.world == [two]
    assert one in play.taken_out


def test_with_fewer_than_the_fewest_nobody_trains() -> None:
    """The survivor waits for a newcomer and joins it (horovod issue #3494)."""
    play = training({"a": 1, "b": 1}, fewest=2)
    one, two = play.world
    play.end(two, 1)
    play.ask(one)
    assert play.world == [one, two]
    play.wait(2)
    play.ask(play.started[-1])
    assert play.world == [one, play.started[-1]]


def test_a_job_that_stays_short_of_workers_is_given_up() -> None:
    """After the patience it was given, with exit code 1."""
    play = training({"a": 1, "b": 1}, fewest=2)
    one, two = play.world
    play.find({"a": 1})
    play.end(two, 1)
    play.ask(one)
    play.wait(601)
    assert play.finish == Finish(TOO_FEW_WORKERS, "fewer than 2 workers for 600 s")
    assert play.taken_out[one] == play.finish.reason


def test_a_job_says_what_it_waits_for() -> None:
    """With fewer slots than -np, within seconds; and after a minute the first world starts with what there is."""
    play = Play({"a": 2}, first=4, fewest=1)
    play.ask(*play.started)
    play.wait(5)
    expected = "waiting for workers: 2 of 4 are ready; the hosts have 2 slots; in 55 s the training starts with"
    assert [line[: len(expected)] for line in play.told] == [expected]
    play.wait(54)
    assert not play.world
    play.wait(2)
    assert play.world == play.started
    assert len(play.told) == 1


def test_a_job_that_is_short_of_workers_says_so_each_minute() -> None:
    """Until when it waits, too."""
    play = training({"a": 2, "b": 2}, fewest=3, most=4)
    one, two, *others = play.world
    play.find({"a": 2})
    for other in others:
        play.end(other, 255)
    play.ask(one, two)
    play.wait(130)
    expected = "waiting for workers: 2 of 3 are ready; the hosts have 2 slots; if there are fewer than 3 in "
    left = [line.removeprefix(expected) for line in play.told]
    assert left == [f"{s} s, the job ends. Add hosts to the list, or give --min-np 2" for s in (595, 535, 475)]


def test_workers_that_build_are_not_waited_for_in_silence_for_ever() -> None:
    """A line after a minute, without a limit as long as they report."""
    play = Play({"a": 2}, first=2, fewest=2)
    play.wait(61)
    assert play.told == ["waiting for workers: 0 of 2 are ready, 2 are starting; the hosts have 2 slots"]


def test_the_job_ends_when_all_have_ended_well() -> None:
    """One by one, as they finish."""
    play = training({"a": 1, "b": 1})
    one, two = play.world
    play.end(two, 0)
    assert play.finish is None
    play.end(one, 0)
    assert play.finish == Finish(0, "done")


def test_the_job_ends_though_one_that_was_taken_out_still_runs() -> None:
    """A stopped process takes a while to be killed; the others have finished."""
    play = training({"a": 1, "b": 1})
    one, stopped = play.world
    play.wait(SILENT_S + 2, stopped)
    play.end(one, 0)
    assert play.finish == Finish(0, "done")


def test_a_worker_that_leaves_with_0_does_not_end_the_job() -> None:
    """Horovod's own driver takes it for a success; here the others go on."""
    play = training({"a": 1, "b": 1})
    one, two = play.world
    play.end(two, 0)
    play.ask(one)
    assert play.world == [one]
    assert play.finish is None


def test_a_committed_end_is_the_end_of_the_job() -> None:
    """A signal to all workers or a time limit is a commit and an end of all, with that exit code."""
    for code in COMMITTED:
        play = training({"a": 1, "b": 1})
        for number in play.world:
            play.end(number, code)
        assert play.finish is not None
        assert play.finish.exit_code == code


def test_all_dead_is_a_new_start() -> None:
    """New workers form a world of their own and go on from the last commit."""
    play = training({"a": 1, "b": 1})
    for number in play.world:
        play.end(number, 137)
    assert play.finish is None
    play.wait(3)
    play.ask(*play.started[2:])
    assert play.world == play.started[2:]


def test_who_builds_and_reports_is_waited_for() -> None:
    """A data set may take longer than the patience; a worker that was never heard of does not count."""
    play = Play({"a": 1}, first=1)
    play.wait(2000)
    assert play.finish is None
    play.wait(600 + SILENT_S, play.started[0])
    assert play.finish is None
    play.wait(2, play.started[0])
    assert play.finish is not None
    assert play.finish.exit_code == TOO_FEW_WORKERS


def test_a_newcomer_that_dies_when_it_joins_comes_ever_more_seldom() -> None:
    """However long it takes to build: the others are disturbed each time."""
    play = training({"a": 1, "b": 1})
    old = play.world[:1]
    bad = play.world[1]
    waits = []
    for _ in range(4):
        play.end(bad, 137)
        play.ask(*old)
        begun = play.now
        while play.newest("b") == bad and play.newest("a") == old[0]:
            play.wait(1)
        waits.append(play.now - begun)
        bad = play.started[-1]
        play.wait(100)
        play.ask(bad)
        play.ask(*old)
    assert waits == [1, 2, 4, 8]


def test_a_host_that_comes_back_with_fewer_slots_disturbs_nobody() -> None:
    """Its worker in a slot that is gone leaves after a step, as if the host had not been away."""
    play = training({"a": 1, "b": 2})
    one, two, three = play.world
    play.find({"a": 1})
    play.find({"a": 1, "b": 1})
    assert play.roster.wants_change()
    play.ask(one, two, three)
    assert play.world == [one, two]
    assert list(play.taken_out) == [three]


def test_a_host_that_fails_for_days_does_not_end_the_job() -> None:
    """Its next attempt comes after a minute, whether it is the hundredth or the two-thousandth."""
    play = training({"a": 1})
    old = play.world
    play.find({"a": 1, "bad": 1})
    for _ in range(2000):
        play.end(play.newest("bad"), 255)
        play.now += LONGEST_BACK_OFF_S
        play.roster.heartbeat_received(old[0], play.now)
        play.obey()
    assert len(play.started) == 2002
    assert (play.world, play.finish) == (old, None)


def test_a_worker_that_dies_after_a_steady_life_is_replaced_at_once() -> None:
    """However often: a host that crashes once an hour is as good as any other."""
    play = training({"a": 1, "b": 1})
    first = play.world[0]
    for _ in range(8):
        play.wait(STEADY_S / 2)
        play.ask(*play.world)  # a change of world does not make it new
        play.wait(STEADY_S / 2)
        play.end(play.world[1], 137)
        play.ask(first)
        play.wait(1)
        play.ask(play.newest("b"))
        play.ask(first)
        assert play.world == [first, play.newest("b")]


def test_rank_0_speaks_for_a_job_that_has_died() -> None:
    """Another rank that left with 0, for whatever reason, does not make a success of it."""
    play = training({"a": 1, "b": 1})
    one, two = play.world
    play.end(two, 0)
    play.end(one, 137)
    assert play.finish is None
    play.wait(3)
    play.ask(*play.started[2:])
    assert play.world == play.started[2:]


def test_there_are_never_more_workers_than_the_most() -> None:
    """However many slots the hosts have; a slot that stays empty is where the next one starts."""
    play = Play({"a": 2, "b": 2}, first=3, most=3)
    assert len(play.started) == 3
    play.ask(*play.started)
    assert len(play.world) == 3
    play.find({"a": 2, "b": 2, "c": 4})
    assert not play.roster.wants_change()
    play.end(play.world[0], 137)
    assert len(play.started) == 4
    play.ask(*play.world[1:])
    play.ask(play.started[-1])
    assert play.roster.wants_change()
    play.ask(*play.world)
    assert len(play.world) == 3
    play.wait(100)
    assert len(play.started) == 4


def test_one_that_does_not_end_takes_nobodys_room() -> None:
    """A stopped process, or an ssh that hangs, may be there for minutes; its successor starts elsewhere meanwhile."""
    play = Play({"a": 1, "b": 1, "c": 1}, first=2, most=2)
    one, stopped = play.started
    play.ask(one, stopped)
    play.wait(SILENT_S + 2, stopped)
    assert list(play.taken_out) == [stopped]
    assert [play.hosts[number] for number in play.started] == ["a", "b", "c"]


def test_nobody_leaves_a_host_before_there_are_enough_others() -> None:
    """To leave at once would be to wait, when all could train; once a newcomer is ready they change places."""
    play = training({"a": 1, "b": 1}, fewest=2)
    one, two = play.world
    play.find({"a": 1})
    assert not play.roster.wants_change()
    play.find({"a": 1, "c": 1})
    assert not play.roster.wants_change()
    play.ask(play.newest("c"))
    assert play.roster.wants_change()
    play.ask(one, two)
    assert play.world == [one, play.newest("c")]
    assert list(play.taken_out) == [two]


def test_the_state_outlives_a_change_of_all_hosts() -> None:
    """Those on the old hosts hand it on, and leave after a step in common."""
    play = training({"a": 1})
    (old,) = play.world
    play.find({"b": 1})
    new = play.newest("b")
    assert not play.roster.wants_change()
    play.ask(new)
    assert play.roster.wants_change()
    play.ask(old)
    assert play.world == [old, new]
    assert not play.taken_out
    assert play.roster.wants_change()
    play.ask(old, new)
    assert play.world == [new]
    assert list(play.taken_out) == [old]


def test_each_meeting_waits_as_long_as_the_first() -> None:
    """A member that takes some seconds to come, hours after another meeting, is waited for."""
    play = training({"a": 1, "b": 1})
    one, two = play.world
    play.ask(one)
    play.wait(REPORT_S / 2)
    play.ask(two)
    play.wait(2 * REPORT_S)
    play.ask(one)
    play.wait(REPORT_S - 1)
    play.ask(two)
    assert (play.world, play.taken_out) == ([one, two], {})


def test_who_asks_for_a_rank_is_alive() -> None:
    """Though its heartbeats were lost on the way."""
    play = training({"a": 1, "b": 1})
    one, two = play.world
    play.wait(SILENT_S - 1, two)
    play.ask(two)
    play.wait(2, two)
    play.ask(one)
    assert (play.world, play.taken_out) == ([one, two], {})


def test_while_members_meet_no_other_one_is_asked_to() -> None:
    """It comes by itself, since its world is broken; a newcomer is let in by the same meeting."""
    play = training({"a": 1, "b": 1})
    one, two = play.world
    play.find({"a": 1, "b": 1, "c": 1})
    play.ask(one)
    play.ask(play.newest("c"))
    assert not play.roster.wants_change()
    play.ask(two)
    assert play.world == [one, two, play.newest("c")]


def test_what_a_worker_ends_with_that_was_taken_out_says_nothing() -> None:
    """The signal that ended it was ours: its job has committed nothing."""
    play = training({"a": 1, "b": 1})
    one, stopped = play.world
    play.wait(SILENT_S + 2, stopped)
    play.end(stopped, 143)
    play.end(one, 137)
    assert play.finish is None
    play.wait(3)
    play.ask(*play.started[2:])
    assert play.world == play.started[2:]


def test_a_host_that_was_wrong_again_and_again_is_left_out_until_it_is_listed_anew() -> None:
    """Its other members leave after the next step, and nobody is started there; the others go on."""
    play = training({"a": 1, "bad": 2})
    host_of = {number: play.roster.worker(number).host for number in play.world}  # type: ignore[union-attr]
    (good,), bad = ([number for number in play.world if host_of[number] == host] for host in ("a", "bad"))
    play.end(bad[0], UNTRUSTED)
    play.ask(good, bad[1])
    assert play.world == [good]
    play.end(bad[1], UNTRUSTED)
    play.wait(3600)
    play.find({"a": 1, "bad": 2})
    play.wait(60)
    assert len(play.started) == 3
    play.find({"a": 1})
    play.find({"a": 1, "bad": 2})
    play.wait(1)
    assert len(play.started) == 5
