"""The ranks of workers in a world. Pure."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hvd_train.elastic.worker import Worker


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
    environment: Mapping[str, str] = field(default_factory=dict)  # for the process, in addition to Horovod's

    def to_response_string(self) -> str:
        """Return the ranks in the form that Horovod's core reads."""
        values = (self.rank, self.size, self.local_rank, self.local_size, self.cross_rank, self.cross_size)
        return ",".join(map(str, values))


def assign_ranks(workers: Sequence[Worker]) -> list[RankAssignment]:
    """Return the ranks of these workers, in the order of `workers`."""
    hosts_with: dict[int, list[str]] = defaultdict(list)  # by local rank
    local_ranks = []
    local_sizes: Counter[str] = Counter()
    for worker in workers:
        local_ranks.append(local_sizes[worker.host])
        hosts_with[local_ranks[-1]].append(worker.host)
        local_sizes[worker.host] += 1
    return [
        RankAssignment(
            hostname=worker.host,
            rank=rank,
            local_rank=local_rank,
            cross_rank=hosts_with[local_rank].index(worker.host),
            size=len(workers),
            local_size=local_sizes[worker.host],
            cross_size=len(hosts_with[local_rank]),
            worker=worker.number,
        )
        for rank, (worker, local_rank) in enumerate(zip(workers, local_ranks, strict=True))
    ]


def starting(worker: Worker, local_size: int, environment: Mapping[str, str]) -> RankAssignment:
    """Return the assignment of a starting process, whose number replaces the local rank."""
    return RankAssignment(worker.host, 0, worker.number, 0, 1, local_size, 1, worker.number, environment)
