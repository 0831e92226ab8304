"""Elastic jobs without processes: a history for the roster, a dispatcher whose workers are threads."""

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from horovod.runner.common.util.hosts import SlotInfo

from hvd_train.elastic.dispatcher import Dispatcher
from hvd_train.elastic.roster import End, Finish, FormWorld, Notice, Roster, Start, Worker
from hvd_train.launch.exit_report import During, ExitReport
from tests.support.launching import wait_for


class Play:
    """A job of which a test gives events and time; commands are carried out at once."""

    def __init__(
        self, hosts: dict[str, int], *, first: int, fewest: int = 1, most: int = 8, begins_at: float = 0.0
    ) -> None:
        self.roster = Roster(first, fewest, most, patience_s=600)
        self.now = begins_at
        self.started: list[int] = []
        self.hosts: dict[int, str] = {}
        self.world: list[int] = []
        self.evicted: dict[int, str] = {}
        self.killed: list[int] = []  # evicted workers that do not react
        self.notices: list[str] = []
        self.finish: Finish | None = None
        self.find(hosts)

    def find(self, hosts: dict[str, int]) -> None:
        self.roster.hosts_found(hosts)
        self.obey()

    def ask(self, *numbers: int) -> None:
        for number in numbers:
            self.roster.rank_requested(number, self.now)
        self.obey()

    def end(self, number: int, code: int) -> None:
        self.roster.worker_exited(number, code, self.now)
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
        self.roster.exit_report_received(number, ExitReport(code, "Traceback", during, step), self.now)
        self.obey()

    def say_ended(self, *numbers: int) -> None:
        """Let these workers report that their training has ended, after 20 steps; their processes run on."""
        for number in numbers:
            self.roster.exit_report_received(number, ExitReport(0, during="ended", step=20), self.now)
        self.obey()

    def miss(self, *numbers: int) -> None:
        """Let these workers report that they could not connect, and ask again."""
        for number in numbers:
            self.roster.connect_error_received(number, "connection refused")
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
        for command in self.roster.commands(self.now):
            if isinstance(command, Start):
                self.started.append(command.worker.number)
                self.hosts[command.worker.number] = command.worker.host
            elif isinstance(command, FormWorld):
                self.world = [worker.number for worker in command.workers]
            elif isinstance(command, End):
                self.evicted[command.worker.number] = command.reason
                self.killed += [command.worker.number] if command.unresponsive else []
            elif isinstance(command, Notice):
                self.notices.append(command.message)
            else:
                self.finish = command


def training(hosts: dict[str, int], **limits: int) -> Play:
    """Return a job whose first world has all slots."""
    play = Play(hosts, first=sum(hosts.values()), **limits)
    play.ask(*play.started)
    assert play.world == play.started
    return play


class Job:
    """A job with a real dispatcher; its workers run until the test ends them with an exit code, or the job does."""

    def __init__(self, hosts: dict[str, int]) -> None:
        self.hosts = hosts
        self.started: list[Worker] = []
        self.variables: dict[int, Mapping[str, str]] = {}  # of each worker
        self.exit_codes: dict[int, int] = {}
        self.deaf: set[int] = set()  # workers that ignore the request to end
        self.over = False  # whether each worker ends by itself, also one that is only about to start
        self.interrupted = threading.Event()
        self._finish: Future[Finish] = Future()
        roster = Roster(sum(hosts.values()), 1, 8, patience_s=60)
        self.dispatcher = Dispatcher(roster, lambda: self.hosts, lambda ranks: None, self._run_worker, self.interrupted)

    def start(self) -> None:
        slots = sum(self.hosts.values())
        threading.Thread(target=lambda: self._finish.set_result(self.dispatcher.run()), daemon=True).start()
        wait_for("all workers", lambda: len(self.started) == slots)

    def _run_worker(self, worker: Worker, variables: Mapping[str, str], end: threading.Event) -> int:
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
