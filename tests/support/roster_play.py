"""Play a history of an elastic job: tests give events and time; commands are carried out at once."""

from hvd_train.elastic.roster import End, Finish, FormWorld, Notice, Roster, Start
from hvd_train.launch.last_word import During, LastWord


class Play:
    """A job under test; time passes only in `wait`."""

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
        self.roster.last_word_received(number, LastWord(code, "Traceback", during, step), self.now)
        self.obey()

    def miss(self, *numbers: int, why: str = "connection refused") -> None:
        """Let these workers report that they could not connect, and ask again."""
        for number in numbers:
            self.roster.not_met(number, why)
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
