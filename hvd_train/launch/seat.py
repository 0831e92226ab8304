"""Where the process of a rank, and that of its launcher, are found by whoever looks for them later. No torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hvd_train.launch.addresses import is_loopback
from hvd_train.travel import may_travel

DRIVER = "HVD_TRAIN_DRIVER_PROCESS"  # host, process number and start of the driver, which gives it to its workers
_LAUNCHERS = {"horovodrun", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "srun", "slurmstepd"}


@may_travel
@dataclass(frozen=True)
class Process:
    """A process of a host, told from others that have had its number by when it was started."""

    host: str
    number: int
    started: int
    """In ticks of the host's clock since it was booted."""


@may_travel
@dataclass(frozen=True)
class Seat:
    """The process of a rank, and what has started it."""

    process: Process
    address: str
    """By what name the launcher reaches its host."""
    launcher: Process | None = None
    """The launcher, where that is known: on its own host, or in an elastic job."""


def of_this_process(environ: Mapping[str, str]) -> Seat:
    """Return the seat of this process."""
    host, address = socket.gethostname(), environ.get("HOROVOD_HOSTNAME", "")
    return Seat(
        _process(host, os.getpid()),
        host if address in ("", "localhost") or is_loopback(address) else address,
        _launcher(environ),
    )


def told_to_workers() -> str:
    """Return what a driver, this process, puts into the variable DRIVER."""
    own = _process(socket.gethostname(), os.getpid())
    return f"{own.host} {own.number} {own.started}"


def _launcher(environ: Mapping[str, str]) -> Process | None:
    with suppress(ValueError):
        host, number, started = environ.get(DRIVER, "").split()
        return Process(host, int(number), int(started))
    above = os.getppid()
    with suppress(OSError, ValueError, IndexError):
        while above > 1:
            name, fields = stat_of(above)
            if name in _LAUNCHERS:
                return _process(socket.gethostname(), above)
            above = int(fields[1])
    return None


def _process(host: str, number: int) -> Process:
    with suppress(OSError):
        return Process(host, number, int(stat_of(number)[1][19]))
    return Process(host, number, 0)


def stat_of(number: int) -> tuple[str, list[str]]:
    """Return the name of a process, and the fields of its /proc/PID/stat after it. Raises OSError where it is gone."""
    text = Path(f"/proc/{number}/stat").read_text(encoding="ascii", errors="replace")
    return text[text.index("(") + 1 : text.rindex(")")], text.rpartition(")")[2].split()
