"""Which ranks were found to be wrong, and on which hosts: what a process remembers of it through all its worlds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_train.errors import HostUntrusted, ReplicasDiffer
from hvd_train.world.world import WorldChanged

MOST_OF_A_HOST = 3
"""So often a host may be wrong, or ranks may differ without a majority, in the life of a process."""
MOST_WITHOUT_PROGRESS = 3
"""So often in a row ranks may differ with no step in between that was found equal and is later than all before."""
LEFT_OUT_AT = 2
"""So often a host is wrong before an elastic job goes on without it."""
_UNKNOWN = ""  # the host, where no majority says which rank is wrong


@dataclass(frozen=True)
class Difference:
    """Ranks that hold other states, or compute other gradients, than the others."""

    message: str
    odd: tuple[int, ...] = ()
    """The ranks that most others contradict; empty where no majority says which are right."""
    right_at: int | None = None
    """The last step after which a comparison of this kind found nothing, where a commit does not say it."""


class StatesDiffer(WorldChanged):
    """Raised where ranks were found to differ: they come to one state in the world that follows."""

    def __init__(self, found: Difference) -> None:
        super().__init__(found.message)
        self.found = found


class Suspicions:
    """What was found of hosts. All ranks that were there know the same."""

    def __init__(self) -> None:
        self._wrong = Counter[str]()
        self._in_row, self._farthest = 0, -1

    def note(self, found: Difference, verified_step: int, hosts: Sequence[str]) -> None:
        """Note that ranks differ; `hosts` has the host of each rank.

        The states of all ranks were last found equal after `verified_step` steps.
        """
        self._in_row = self._in_row + 1 if verified_step <= self._farthest else 1
        self._farthest = max(self._farthest, verified_step)
        self._wrong.update({hosts[rank] for rank in found.odd} or {_UNKNOWN})

    def raise_if_hopeless(self, found: Difference, own_host: str, hosts: Sequence[str], *, may_leave: bool) -> None:
        """Raise where going back to a commit once more would not help.

        HostUntrusted is raised on the ranks of a host that was wrong twice, where the job `may_leave` it out and has
        other ones; ReplicasDiffer on all ranks at the third time.
        """

        def is_left_out(host: str) -> bool:
            return may_leave and self._wrong[host] >= LEFT_OUT_AT and set(hosts) != {host}

        if is_left_out(own_host):
            raise HostUntrusted(
                f"{found.message}; host {own_host} was wrong before, and is left out: its memory or processor may fail"
            )
        left_out = set(filter(is_left_out, hosts))
        of_hosts = max((count for host, count in self._wrong.items() if host not in left_out), default=0)
        if of_hosts >= MOST_OF_A_HOST or self._in_row >= MOST_WITHOUT_PROGRESS:
            raise ReplicasDiffer(
                f"{found.message}; it is the third time: look for a program that treats ranks differently, or leave "
                "out that host, whose memory or GPU may fail; the same command goes on from the last commit, where all "
                "agreed"
            )
