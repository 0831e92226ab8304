"""A history of an elastic job: a test says what happens and when, and the roster's commands are carried out at once."""

from __future__ import annotations

from hvd_train.elastic.roster import End, Finish, FormWorld, Roster, Start, Tell
from hvd_train.launch.last_word import During, LastWord


class Play:
    """A job under test; time stands still unless it is told to go on."""

    def __init__(
        self, hosts: dict[str, int], *, first: int, fewest: int = 1, most: int = 8, begins_at: float = 0.0
    ) -> None:
        self.roster = Roster(first, fewest, most, patience_s=600)
        self.now = begins_at
        self.started: list[int] = []
        self.hosts: dict[int, str] = {}
        self.world: list[int] = []
        self.taken_out: dict[int, str] = {}
        self.given_up: list[int] = []  # those of them that are not waited for
        self.told: list[str] = []
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

    def tell_to_end(self, *numbers: int) -> None:
        """A signal tells these workers to end, and they say so."""
        for number in numbers:
            self.roster.told_to_end(number)
        self.obey()

    def fail(self, number: int, during: During, step: int = 0, code: int = 1) -> None:
        """An error ends a worker, and its process with it."""
        self.say(number, during, step, code)
        self.end(number, code)

    def say(self, number: int, during: During, step: int = 0, code: int = 1) -> None:
        """A worker says which error ends it; its process goes on for a while."""
        self.roster.last_word_received(number, LastWord(code, "Traceback", during, step), self.now)
        self.obey()

    def miss(self, *numbers: int, why: str = "connection refused") -> None:
        """These workers have not met in their world, and wait for another."""
        for number in numbers:
            self.roster.not_met(number, why)
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
        for command in self.roster.commands(self.now):
            if isinstance(command, Start):
                self.started.append(command.worker.number)
                self.hosts[command.worker.number] = command.worker.host
            elif isinstance(command, FormWorld):
                self.world = [worker.number for worker in command.workers]
            elif isinstance(command, End):
                self.taken_out[command.worker.number] = command.reason
                self.given_up += [command.worker.number] if command.unresponsive else []
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
