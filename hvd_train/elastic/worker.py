"""The workers of an elastic job: their stages, ranks, exit codes, and errors that repeat. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from hvd_train.launch.exit_report import ExitReport

# Exit codes of a worker that end the whole job. UNRECOVERABLE: replicas differ, a fault repeats, the loss stays not
# finite, the final files could not be written. COMMITTED: a commit before the end of the training.
WRONG_SETTINGS = 2
FAULT_REPEATS = 5
UNRECOVERABLE = (4, FAULT_REPEATS, 6, 74)
STOPPED = (129, 130, 138, 143)  # by a signal to the worker
NO_DRIVER = 75
COMMITTED = (NO_DRIVER, *STOPPED)

SAME_ERRORS = 3  # an error that repeats this often, in any worker, ends the job
NEAR_STEPS = 1  # samples may be read one step ahead, so one damaged image can end workers in neighbouring steps

BUILDING, RENDEZVOUS = -20, -10  # places of errors, in place of the number of finished steps


class Stage(Enum):
    """The stage of a worker, as far as the roster knows."""

    STARTING = "starting"
    READY = "ready"  # it has built the model and waits for its first rank
    TRAINING = "training"
    REJOINING = "rejoining"  # it has left its world and waits for a rank in the next one
    LEAVING = "leaving"  # it has reported the error that ends it
    ENDING = "ending"  # it is evicted


@dataclass(eq=False)
class Worker:
    """One process in a slot of a host; its number is unique in the job."""

    number: int
    host: str
    slot: int
    started_at: float
    last_heartbeat: float  # or request
    stage: Stage = Stage.STARTING
    got_signal: bool = False
    world: tuple[Worker, ...] = ()  # the members of its last world; the others may have formed another one since
    connected: bool = False  # whether it has connected to other ranks and synchronized the state with them
    exit_report: ExitReport | None = None
    reported_at: float = 0.0  # when that came

    def __str__(self) -> str:
        return f"{self.host}[{self.slot}]"

    @property
    def failed_to_connect(self) -> bool:
        """Whether an error ended it in a rendezvous."""
        return self.exit_report is not None and self.exit_report.during == "rendezvous"

    def meant_exit_code(self, exit_code: int) -> int:
        """Return the exit report's code if a signal or an error ended it, else `exit_code`."""
        report = self.exit_report
        is_useless = exit_code < 0 or exit_code >= 128  # of ssh, or a library that crashed in an exit handler
        return report.exit_code if report and (report.error or is_useless) else exit_code


@dataclass(frozen=True)
class RankAssignment:
    """The ranks of one worker in one world, with the fields of Horovod's `SlotInfo`."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int  # the number of its host among the hosts that have this local rank
    size: int
    local_size: int
    cross_size: int
    worker: int  # its number, which stays the same while its ranks change

    def to_response_string(self) -> str:
        """Return the ranks in the form that Horovod's core reads."""
        values = (self.rank, self.size, self.local_rank, self.local_size, self.cross_rank, self.cross_size)
        return ",".join(map(str, values))


def assign_ranks(workers: Sequence[Worker]) -> list[RankAssignment]:
    """Return the ranks of these workers, in the order of `workers`."""
    hosts_with: dict[int, list[str]] = defaultdict(list)  # by local rank
    local_sizes: Counter[str] = Counter()
    places = []
    for worker in workers:
        local_rank = local_sizes[worker.host]
        places.append((local_rank, len(hosts_with[local_rank])))
        hosts_with[local_rank].append(worker.host)
        local_sizes[worker.host] += 1
    size = len(workers)
    return [
        RankAssignment(host, rank, local, cross, size, local_sizes[host], len(hosts_with[local]), worker.number)
        for rank, (worker, (local, cross)) in enumerate(zip(workers, places, strict=True))
        for host in [worker.host]
    ]


def place_of_error(worker: Worker, *, others_train: bool) -> int | None:
    """Return the place of a worker's error, or None if only this worker may have it."""
    if not worker.world:
        return None if others_train else BUILDING
    if worker.exit_report is None:
        return None
    if worker.failed_to_connect:
        return None if not worker.connected and any(other.connected for other in worker.world) else RENDEZVOUS
    return worker.exit_report.step
