"""Any job: a slot has one worker, a world consists of live workers, and the job ends.

`Play` asserts the first two.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from hvd_train.elastic.roster import PAUSED_S
from tests.support.jobs import Play

HOSTS = st.dictionaries(st.sampled_from("abc"), st.integers(1, 2), max_size=3) | st.just({"c": 2})
ANY = st.integers(0, 99)  # one of the workers, or of the members
CODES = st.sampled_from([0, 1, 2, 75, 137, 143, 255])


class AnyJob(RuleBasedStateMachine):
    @initialize(fewest=st.integers(1, 2), begun=st.booleans())
    def start(self, fewest: int, begun: bool) -> None:
        self.play = Play("abb", first=3, fewest=fewest, most=4)
        self.lost = set()  # workers that are silent for ever
        if begun:
            self.play.ask(*self.play.started)

    def one(self, number: int) -> int:
        return sorted(self.play.alive)[number % len(self.play.alive)]

    def lives(self) -> bool:
        return bool(self.play.alive) and self.play.finish is None

    @rule(hosts=HOSTS)
    def hosts_change(self, hosts: dict[str, int]) -> None:
        self.play.find(hosts)

    @precondition(lives)
    @rule(number=ANY)
    def a_worker_asks(self, number: int) -> None:
        self.play.ask(self.one(number))

    @rule()
    def all_ask(self) -> None:
        self.play.ask(*self.play.alive)

    @precondition(lives)
    @rule(number=ANY, code=CODES)
    def a_process_ends(self, number: int, code: int) -> None:
        self.play.end(self.one(number), code)

    @rule(code=CODES)
    def all_processes_end(self, code: int) -> None:
        for number in sorted(self.play.alive):
            self.play.end(number, code)

    @precondition(lives)
    @rule(
        number=ANY,
        during=st.sampled_from(["building", "rendezvous", "training"]),
        step=st.integers(0, 3),
    )
    def a_worker_reports_an_error(self, number: int, during: str, step: int) -> None:
        self.play.say(self.one(number), during, step)

    @precondition(lives)
    @rule(number=ANY)
    def a_worker_gets_a_signal(self, number: int) -> None:
        self.play.signal(self.one(number))

    @precondition(lives)
    @rule(number=ANY)
    def a_host_is_lost(self, number: int) -> None:
        self.lost.add(self.one(number))

    @precondition(lives)
    @rule()
    def no_rank_connects(self) -> None:
        self.play.miss(*(number for number in self.play.world if number in self.play.alive))

    @precondition(lives)
    @rule(number=ANY)
    def a_training_ends(self, number: int) -> None:
        if (member := self.one(number)) in self.play.world:
            self.play.say_ended(member)

    @rule(seconds=st.sampled_from([1, 4, 12, 45]), silent=st.sets(ANY, max_size=1))
    def time_passes(self, seconds: int, silent: set[int]) -> None:
        self.play.wait(seconds, *self.lost, *map(self.one, silent if self.play.alive else ()))

    @rule(seconds=st.sampled_from([10, 4000]))
    def the_driver_is_paused(self, seconds: int) -> None:
        self.play.now += seconds
        self.play.obey()

    def teardown(self) -> None:
        """Let all workers that are left do as they should, until the job ends."""
        play = self.play
        for _ in range(1000):
            if play.finish is not None:
                return
            for number in sorted(play.alive):
                if number in play.leaving:
                    play.end(number, 1)
                elif number in self.lost:
                    continue
                elif number in play.ended:
                    play.end(number, 0)
                elif number in play.world and number not in play.waiting:
                    play.say_ended(number)
                else:
                    play.ask(number)
            play.now += PAUSED_S
            for number in play.alive.keys() - self.lost:
                play.roster.heartbeat_received(number, play.now)
            play.obey()
        raise AssertionError(f"the job has not ended: {play.roster}")


TestAnyJob = AnyJob.TestCase
TestAnyJob.settings = settings(max_examples=80, stateful_step_count=12)
