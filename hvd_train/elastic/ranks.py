"""The ranks of workers in a world: one number among all, one on the host, one among hosts. Pure."""

from __future__ import annotations

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
    """The worker's number among those on its host."""
    cross_rank: int
    """The number of its host among the hosts that have this local rank."""
    size: int
    local_size: int
    cross_size: int
    worker: int
    """The number of the worker, which stays the same while its ranks change."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that a process gets at its start, next to Horovod's."""

    def to_response_string(self) -> str:
        """Return the ranks in the form that Horovod's core reads."""
        pairs = (self.rank, self.size, self.local_rank, self.local_size, self.cross_rank, self.cross_size)
        return ",".join(map(str, pairs))


def assign_ranks(workers: Sequence[Worker]) -> list[RankAssignment]:
    """Return the ranks of these workers, which come in the order of their ranks."""
    on_host: Counter[str] = Counter(worker.host for worker in workers)
    hosts_with: dict[int, list[str]] = defaultdict(list)
    local_ranks = []
    seen: Counter[str] = Counter()
    for worker in workers:
        local_ranks.append(seen[worker.host])
        hosts_with[seen[worker.host]].append(worker.host)
        seen[worker.host] += 1
    return [
        RankAssignment(
            hostname=worker.host,
            rank=rank,
            local_rank=local_ranks[rank],
            cross_rank=hosts_with[local_ranks[rank]].index(worker.host),
            size=len(workers),
            local_size=on_host[worker.host],
            cross_size=len(hosts_with[local_ranks[rank]]),
            worker=worker.number,
        )
        for rank, worker in enumerate(workers)
    ]


def starting(worker: Worker, local_size: int, environment: Mapping[str, str]) -> RankAssignment:
    """Return the assignment for a process that starts: it has no rank yet; its number stands for the local rank."""
    number = worker.number
    return RankAssignment(worker.host, 0, number, 0, 1, local_size, 1, number, environment)
