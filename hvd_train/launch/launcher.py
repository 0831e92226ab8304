"""Read from the environment which launcher started this process, and as which rank. No torch."""

import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvd_train.errors import UsageError, whole_number
from hvd_train.launch.workers import WORKER, elastic

TORCHRUN = "torchrun"
"""Or another launcher that sets its variables: Kubeflow, Azure ML, Ray, ..."""
HOST_OF_TORCHRUN = "torchrun-host-"  # and its number: torchrun knows no name
# Launcher, variable of the rank, variable of the size. Horovod's own come first: horovodrun over
# MPI sets both.
_VARIABLES = (
    ("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPICH", "PMI_RANK", "PMI_SIZE"),
    # not SLURM_NTASKS, which a batch script has as well
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    (TORCHRUN, "RANK", "WORLD_SIZE"),
)


@dataclass(frozen=True)
class Launch:
    """The rank of one process in the group that a launcher started."""

    launcher: str
    rank: int
    size: int


def launched(environ: Mapping[str, str]) -> Launch | None:
    """Return the rank that a launcher gave to this process, or None without a launcher.

    A single task of srun, perhaps a shell, has no launcher: its MPI could not start. A single rank
    of torchrun runs alone.
    """
    known: Sequence[tuple[str, str, str]] = _VARIABLES
    if "TORCHELASTIC_RUN_ID" in environ:  # torchrun, perhaps in a task of Slurm or MPI
        known = (_VARIABLES[0], _VARIABLES[-1])
    for launcher, rank, size in known:
        number = whole_number(environ.get(rank, ""))
        count = whole_number(environ.get(size, ""))
        if number is None or count is None:
            continue
        if count > 1 or launcher not in ("srun", TORCHRUN):
            return Launch(launcher, number, count)
    return None


def host_name(environ: Mapping[str, str]) -> str:
    """Return the name by which the launcher knows this host, or else its own."""
    name = environ.get("HOROVOD_HOSTNAME", "localhost")
    is_no_name = name == "localhost" or name.startswith(("127.", HOST_OF_TORCHRUN))
    return socket.gethostname() if is_no_name else name


def prints() -> bool:
    """Return whether this process prints what all ranks find: rank 0, or any without a launcher."""
    ours = launched(os.environ)
    return ours is None or ours.rank == 0


def refuse_others(
    environ: Mapping[str, str], command: Sequence[str], *, alone: bool = False
) -> None:
    """Raise UsageError for ranks of Horovod's elastic driver, ranks without a number, and any ranks
    if a command runs `alone`.
    """
    if elastic(environ) and WORKER not in environ:
        raise UsageError(
            "horovodrun --min-np starts Horovod's own driver: type `hvd-train launch --elastic`"
        )
    size = whole_number(environ.get("WORLD_SIZE", "")) or 1
    ours = launched(environ)
    # A task of Slurm in which another launcher starts ranks is no rank.
    in_task = (
        ours is not None
        and ours.launcher == "srun"
        and ours.size != size
        and "LOCAL_RANK" in environ
    )
    if size > 1 and (ours is None or in_task):
        line = (
            shlex.join(command)
            if alone
            else f"hvd-train launch --np {size} -- {shlex.join(command)}"
        )
        started = f"WORLD_SIZE={size} without RANK: each of {size} processes would run alone"
        raise UsageError(f"{started}; type `{line}`, or `unset WORLD_SIZE` if no launcher set it")
    if alone and ours and ours.size > 1:
        one = f"this command runs alone: type `{shlex.join(command)}` without a launcher"
        raise UsageError(f"{ours.launcher} started {ours.size} processes, and {one}")
