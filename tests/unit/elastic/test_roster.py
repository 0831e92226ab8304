"""Who is started, let in, waited for and given up: histories of an elastic job, played on a clock of the test's."""

from __future__ import annotations

import pytest

from hvd_train.elastic.roster import (
    COMMITTED,
    REPORT_S,
    SILENT_S,
    SILENT_WHILE_MEETING_S,
    STOPPED,
    TOLD_TO_END_S,
    TOO_FEW_WORKERS,
    End,
    Finish,
    FormWorld,
    Roster,
    Start,
    Tell,
)
from hvd_train.launch.last_word import During, LastWord


class Play:
    """A job under test; time stands still unless it is told to go on."""

    def __init__(self, hosts: dict[str, int], *, first: int, fewest: int = 1, most: int = 8) -> None:
        self.roster = Roster(first, fewest, most, patience_s=600)
        self.now = 0.0
        self.started: list[int] = []
        self.hosts: dict[int, str] = {}
        self.world: list[int] = []
        self.taken_out: dict[int, str] = {}
        self.told: list[str] = []
        self.finish: Finish | None = None
        self.find(hosts)

    def find(self, hosts: dict[str, int]) -> None:
        """These are the hosts now."""
        self.roster.hosts_found(hosts)
        self.obey()

    def ask(self, *numbers: int) -> None:
        """These workers wait for a rank."""
        for number in numbers:
            self.roster.rank_requested(number, self.now)
        self.obey()

    def end(self, number: int, code: int) -> None:
        """A worker's process ends."""
        self.roster.worker_exited(number, code, self.now)
        self.obey()

    def tell_to_end(self, *numbers: int) -> None:
        """A signal tells these workers to end, and they say so."""
        for number in numbers:
            self.roster.told_to_end(number)
        self.obey()

    def fail(self, number: int, during: During, step: int = 0, code: int = 1) -> None:
        """An error ends a worker."""
        self.roster.last_word_received(number, LastWord(code, "Traceback", during, step), self.now)
        self.obey()
        self.end(number, code)

    def miss(self, *numbers: int) -> None:
        """These workers have not met in their world, and wait for another."""
        for number in numbers:
            self.roster.not_met(number, "connection refused")
        self.ask(*numbers)

    def newest(self, host: str) -> int:
        """The number of the worker that was started last on a host."""
        return max(number for number in self.started if self.hosts[number] == host)

    def wait(self, seconds: float, *silent: int) -> None:
        """Time goes on; all but the silent ones say that they live."""
        for _ in range(round(seconds)):
            self.now += 1
            for number in self.started:
                if number not in silent:
                    self.roster.heartbeat_received(number, self.now)
            self.obey()

    def obey(self) -> None:
        """Do what the roster says."""
        for command in self.roster.commands(self.now):
            if isinstance(command, Start):
                self.started.append(command.worker.number)
                self.hosts[command.worker.number] = command.worker.host
            elif isinstance(command, FormWorld):
                self.world = [worker.number for worker in command.workers]
            elif isinstance(command, End):
                self.taken_out[command.worker.number] = command.reason
            elif isinstance(command, Tell):
                self.told.append(command.message)
            else:
                self.finish = command


def training(hosts: dict[str, int], **limits: int) -> Play:
    """A job whose first world has all slots."""
    play = Play(hosts, first=sum(hosts.values()), **limits)
    play.ask(*play.started)
    assert play.world == play.started
    return play


def test_the_first_world_waits_for_all() -> None:
    """Workers that are ready wait for those that still import."""
    play = Play({"a": 2, "b": 1}, first=3)
    one, two, three = play.started
    play.ask(one, three)
    assert play.world == []
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
    play.wait(SILENT_S + 2, play.world[1])
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


def test_wrong_settings_end_the_job_at_once() -> None:
    """They are wrong on every host."""
    play = Play({"a": 1, "b": 1}, first=2)
    play.end(play.started[0], 2)
    assert play.finish is not None
    assert play.finish.exit_code == 2
    assert list(play.taken_out) == [play.started[1]]


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


def test_where_all_are_told_to_end_so_does_the_job() -> None:
    """They stop together and commit; the exit code is that of a stop, also where some have left before."""
    play = training({"a": 1, "b": 1})
    one, two = play.world
    play.tell_to_end(one, two)
    assert play.roster.wants_stop()
    play.end(one, 143)
    play.end(two, 143)
    assert play.finish == Finish(143, "stopped, and committed")

    play = training({"a": 1, "b": 1})
    one, two = play.world
    play.tell_to_end(one)
    play.ask(one, two)
    assert play.world == [two]
    play.tell_to_end(two)
    assert play.roster.wants_stop()
    play.end(one, 143)
    play.end(two, 143)
    assert play.finish == Finish(143, "stopped, and committed")

    play = training({"a": 1, "b": 1})
    one, two = play.world
    play.tell_to_end(one, two)
    play.ask(one, two)  # a fault has come before the stop
    assert sorted(play.taken_out) == [one, two]
    play.end(one, 143)
    play.end(two, 143)
    assert play.finish == Finish(143, "stopped, and committed")


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
    play.wait(12)
    assert "has not ended" in play.taken_out[two]


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
        assert "the ranks have not met with it" in play.taken_out[far]
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


def test_where_nobody_is_new_the_last_rank_is_left_out() -> None:
    """Two hosts may have lost the way to each other; what remains trains on."""
    play = training({"a": 1, "b": 1, "c": 1})
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
