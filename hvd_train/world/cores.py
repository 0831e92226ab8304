"""The cores of a host, as the ranks on it share them: what each may use is exchanged, not guessed."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from hvd_train.travel import may_travel
from hvd_train.world import control_groups

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SCHEDULED = "/proc/thread-self/schedstat"  # nanoseconds on a core, nanoseconds in line for one, time slices


@may_travel
@dataclass(frozen=True)
class Cores:
    """Which cores of its host a process may use."""

    host: str
    """Names the running kernel, whatever the containers on it are called."""
    numbers: tuple[int, ...]
    """The cores on which the process may run."""
    quota: float | None = None
    """How many cores' time its control group may take, if that is limited."""
    group: int = 0
    """Names this control group on the host."""


def of_this_process() -> Cores:
    """Return the cores that this process may use."""
    host = socket.gethostname()
    with suppress(OSError):
        host = _BOOT.read_text(encoding="utf-8").strip()
    return Cores(host, tuple(sorted(os.sched_getaffinity(0))), *_quota())


def queued_s() -> float:
    """Return the seconds that this thread has stood in line for a core so far; 0 where the kernel does not tell."""
    with suppress(OSError, ValueError, IndexError):
        file = os.open(_SCHEDULED, os.O_RDONLY)  # half the time of Python's own files
        try:
            return int(os.read(file, 64).split()[1]) / 1e9
        finally:
            os.close(file)
    return 0.0


def share(own: Cores, of_ranks: Sequence[Cores]) -> int:
    """Return how many cores are for one rank, at least 1; `of_ranks` has what each rank may use, this one too.

    A core is divided among the ranks that may use it. So it counts in full where a launcher has bound each rank to
    cores of its own, as Slurm does.
    """
    neighbours = [cores for cores in of_ranks if cores.host == own.host]
    users = Counter(number for cores in neighbours for number in cores.numbers)
    most = sum((Fraction(1, users[number]) for number in own.numbers), Fraction())
    if own.quota is not None:
        most = min(most, Fraction(own.quota) / sum(cores.group == own.group for cores in neighbours))
    return max(1, int(most))


def _quota() -> tuple[float | None, int]:
    """Return the smallest limit of the control groups that this process is in, and that group's number."""
    limits = []
    for group in control_groups.around_this_process():
        with suppress(OSError, ValueError):
            quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()
            limits.append((int(quota) / int(period), group.stat().st_ino))  # "max" is no number
    return min(limits, default=(None, 0))
