"""Elastic jobs without processes: a history for the roster, a dispatcher
whose workers are threads.
"""

import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from horovod.runner.common.util.hosts import SlotInfo

from hvd_train.elastic.dispatcher import Dispatcher
from hvd_train.elastic.roster import (
    FIRST_NUMBER,
    End,
    Finish,
    FormWorld,
    Notice,
    Roster,
    Start,
    Worker,
)
from hvd_train.launch.exit_report import During, ExitReport
from tests.support.launching import wait_for

ONE, TWO, THREE = range(FIRST_NUMBER, FIRST_NUMBER + 3)
"""The first workers of a job."""


class Play:
    """A job of which a test gives events and time; commands are carried out at once.

    It asserts what holds in every job: a slot has one worker, and a world consists of live workers
    that wait for it.
    """

    def __init__(
        self,
        hosts: str | dict[str, int],
        *,
        first: int,
        fewest: int = 1,
        most: int = 8,
        begins_at: float = 0.0,
    ) -> None:
        self.roster = Roster(first, fewest, most, patience_s=600)
        self.limits = range(fewest, most + 1)
        self.now = begins_at
        # workers are their numbers
        self.started = []
        self.hosts = {}
        self.alive = {}  # as the roster knows them
        self.waiting = set()  # for a rank
        self.leaving = set()  # after an error, or evicted
        self.ended = set()  # whose training has ended
        self.exit_codes = {}
        self.world = []
        self.evicted = {}
        self.killed = []  # evicted workers that do not react
        self.notices = []
        self.finish = None
        self.find(hosts)

    def find(self, hosts: str | dict[str, int]) -> None:
        """Change the slots of the hosts; "abb" has one slot of host a and two of b."""
        self.roster.hosts_found(Counter(hosts))
        self.obey()

    def ask(self, *numbers: int) -> None:
        for number in numbers:
            self.roster.rank_requested(number, self.now)
        self.waiting |= {*numbers} & self.alive.keys() - self.leaving
        self.obey()

    def end(self, number: int, code: int) -> None:
        self.roster.worker_exited(number, code, self.now)
        self.alive.pop(number, None)
        self.waiting.discard(number)
        self.exit_codes.setdefault(number, code)
        self.obey()

    def signal(self, *numbers: int) -> None:
        """Let these workers get a signal and report it."""
        for number in numbers:
            self.roster.signal_received(number, self.now)
        self.obey()

    def fail(self, number: int, during: During, step: int = 0, code: int = 1) -> None:
        """End a worker and its process with an error."""
        self.say(number, during, step, code)
        self.end(number, code)

    def say(self, number: int, during: During, step: int = 0, code: int = 1) -> None:
        """Let a worker report its error; its process has not ended yet."""
        self.roster.exit_report_received(
            number, ExitReport(code, "Traceback", during, step), self.now
        )
        self.leaving.add(number)
        self.waiting.discard(number)
        self.obey()

    def say_ended(self, *numbers: int) -> None:
        """Let these workers report that their training has ended, after 20
        steps; their processes run on.
        """
        report = ExitReport(0, during="ended", step=20)
        for number in numbers:
            self.roster.exit_report_received(number, report, self.now)
        self.ended |= {*numbers}
        self.obey()

    def miss(self, *numbers: int) -> None:
        """Let these workers report that they could not connect, and ask again."""
        for number in numbers:
            self.roster.world_left(number, 0, "connection refused")
        self.ask(*numbers)

    def newest(self, host: str) -> int:
        return max(number for number in self.started if self.hosts[number] == host)

    def wait(self, seconds: float, *silent: int) -> None:
        """Let time pass; all workers but the silent ones send heartbeats."""
        for _ in range(round(seconds)):
            self.now += 1
            for number in self.started:
                if number not in silent:
                    self.roster.heartbeat_received(number, self.now)
            self.obey()

    def obey(self) -> None:
        self.survivors = {
            number
            for number in self.waiting.intersection(self.world)
            if not self.alive[number].got_signal
        }
        for command in self.roster.commands(self.now):
            assert self.finish is None or isinstance(command, Finish)
            if isinstance(command, Start):
                self.begin(command.worker)
            elif isinstance(command, FormWorld):
                self.form([worker.number for worker in command.workers])
            elif isinstance(command, End):
                self.evict(command)
            elif isinstance(command, Notice):
                self.notices.append(command.message)
            else:
                self.close(command)

    def begin(self, worker: Worker) -> None:
        assert worker.slot < self.roster.hosts[worker.host]
        # a worker is named by its host and slot
        assert str(worker) not in map(str, self.alive.values()), "a slot has one worker"
        assert not self.ended & self.alive.keys(), "none starts once a training has ended"
        self.alive[worker.number] = worker
        assert len(self.alive.keys() - self.leaving) in range(self.limits.stop)
        self.started.append(worker.number)
        self.hosts[worker.number] = worker.host

    def form(self, numbers: list[int]) -> None:
        assert {*numbers} <= self.waiting, "a world consists of live workers that wait for it"
        assert len(numbers) == len({*numbers})
        assert len(numbers) in self.limits
        members = [number for number in self.world if number in self.alive.keys() - self.leaving]
        staying = [number for number in members if number in numbers]
        assert numbers[: len(staying)] == staying, "survivors come first, in their order"
        assert staying or self.survivors <= {*self.killed}, "the state is lost"
        assert {*members} <= {*numbers} | self.ended, "a member is left out"
        self.waiting -= {*numbers}
        self.world = numbers

    def evict(self, command: End) -> None:
        number = command.worker.number
        self.leaving.add(number)
        self.waiting.discard(number)
        self.evicted[number] = command.reason
        self.killed += [number] if command.kill else []

    def close(self, finish: Finish) -> None:
        assert self.alive.keys() <= self.leaving, "a worker is left"
        if finish.exit_code == 0:
            assert any(
                number in self.ended or self.exit_codes.get(number) == 0 for number in self.world
            )
        self.finish = finish


def training(hosts: str, **limits: int) -> Play:
    """Return a job whose first world has all slots."""
    play = Play(hosts, first=len(hosts), **limits)
    play.ask(*play.started)
    assert play.world == play.started
    return play


class Job:
    """A job with a real dispatcher; its workers run until the test ends them with an
    exit code, or the job does.
    """

    def __init__(self, hosts: str) -> None:
        self.hosts = hosts  # a letter for each slot
        self.looks = 0  # for hosts
        self.started = []
        self.variables = {}  # of each worker
        self.exit_codes = {}
        self.deaf = set()  # workers that ignore the request to end
        # whether each worker ends by itself, also one that is only about to start
        self.over = False
        self.interrupted = threading.Event()
        self._finish = Future()
        self.roster = Roster(len(hosts), 1, 8, patience_s=60)
        self.dispatcher = Dispatcher(
            self.roster, self._find_hosts, lambda ranks: None, self._run_worker, self.interrupted
        )

    def start(self) -> None:
        threading.Thread(
            target=lambda: self._finish.set_result(self.dispatcher.run()), daemon=True
        ).start()
        wait_for("all workers", lambda: len(self.started) == self.roster.start_workers)

    def _find_hosts(self) -> dict[str, int]:
        self.looks += 1
        if isinstance(self.hosts, Exception):
            raise self.hosts
        return Counter(self.hosts)

    def _run_worker(
        self, worker: Worker, variables: Mapping[str, str], end: threading.Event
    ) -> int:
        self.variables[worker.number] = variables
        self.started.append(worker)
        while worker.number in self.deaf or not end.is_set():
            if self.over or worker.number in self.exit_codes:
                return self.exit_codes.get(worker.number, 0)
            end.wait(0.01)
        return 143

    def ask(self, *numbers: int) -> dict[int, SlotInfo | None]:
        """Let these workers ask for a rank at the same time, and return the answers."""
        with ThreadPoolExecutor(len(numbers)) as pool:
            answers = pool.map(self.dispatcher.wait_for_ranks, numbers)
        return dict(zip(numbers, answers, strict=True))

    def end(self) -> Finish:
        """End all remaining workers successfully; return how the job finished."""
        self.deaf.clear()
        self.over = True
        return self.wait_for_end()

    def wait_for_end(self) -> Finish:
        return self._finish.result(60)
