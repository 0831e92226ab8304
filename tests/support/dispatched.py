"""An elastic job whose processes are threads of the test; everything else is real."""

import threading
from concurrent.futures import ThreadPoolExecutor

from hvd_train.elastic.dispatcher import Dispatcher
from hvd_train.elastic.ranks import RankAssignment
from hvd_train.elastic.roster import Finish, Roster
from tests.support.launching import wait_for


class Job:
    """A job whose processes run until the test ends them with an exit code, or the job does."""

    def __init__(self, hosts: dict[str, int], min_workers: int = 1) -> None:
        self.hosts = hosts
        self.worlds: list[int] = []
        self.started: list[RankAssignment] = []
        self.exit_codes: dict[int, int] = {}
        self.deaf: set[int] = set()
        """Workers whose processes ignore the request to end."""
        self.over = False
        """Whether each process ends by itself, also one that is only about to start."""
        self.interrupted = threading.Event()
        roster = Roster(min_workers, min_workers, 8, patience_s=60)
        self.dispatcher = Dispatcher(roster, lambda: self.hosts, lambda ranks: self.worlds.append(len(ranks)))

    def start(self) -> None:
        slots = sum(self.hosts.values())
        self.dispatcher.start(slots, self._run_worker, self.interrupted)
        wait_for("all workers", lambda: len(self.started) == slots)

    def _run_worker(self, ranks: RankAssignment, events: list[threading.Event]) -> tuple[int, float]:
        self.started.append(ranks)
        while ranks.worker in self.deaf or not any(event.is_set() for event in events):
            if self.over or ranks.worker in self.exit_codes:
                return self.exit_codes.get(ranks.worker, 0), 0.0
            events[0].wait(0.01)
        return 143, 0.0

    def ask(self, *numbers: int) -> dict[int, RankAssignment | None]:
        """Let these workers ask for a rank at the same time, and return the answers."""
        host_of = {ranks.worker: ranks.hostname for ranks in self.started}
        with ThreadPoolExecutor(len(numbers)) as pool:
            answers = pool.map(self.dispatcher.wait_for_ranks, [host_of[number] for number in numbers], numbers)
        return dict(zip(numbers, answers, strict=True))

    def end(self) -> Finish:
        """End all remaining workers successfully; return how the job finished."""
        self.deaf.clear()
        self.over = True
        self.dispatcher.stop()
        return self.dispatcher.wait_for_end()
