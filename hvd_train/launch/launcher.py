"""Read the launcher, rank and job of a process from its environment; find other processes;
run horovodrun. No torch.
"""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_train.errors import UsageError, whole_number

# Launcher, variable of the rank, variable of the size. Horovod's own come first: horovodrun over
# MPI sets both.
_VARIABLES = (
    ("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPICH", "PMI_RANK", "PMI_SIZE"),
    # not SLURM_NTASKS, which a batch script has as well
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


if TYPE_CHECKING:
    import psutil


@dataclass(frozen=True)
class Launch:
    """The rank of one process in the group that a launcher started."""

    launcher: str
    rank: int
    size: int


def launched(environ: Mapping[str, str]) -> Launch | None:
    """Return the rank that a launcher gave to this process, or None without a launcher.

    A single task of srun, perhaps a shell, has no launcher: its MPI could not start.
    """
    for launcher, rank, size in _VARIABLES:
        number = whole_number(environ.get(rank, ""))
        count = whole_number(environ.get(size, ""))
        if number is not None and count is not None and (launcher, count) != ("srun", 1):
            return Launch(launcher, number, count)
    return None


def prints(environ: Mapping[str, str]) -> bool:
    """Return whether this process prints what all ranks find: rank 0, or any without a launcher."""
    ours = launched(environ)
    return ours is None or ours.rank == 0


def refuse_others(
    environ: Mapping[str, str], command: Sequence[str], *, alone: bool = False
) -> None:
    """Raise UsageError for ranks of Horovod's elastic driver or torchrun, and for any ranks
    if a command runs `alone`.

    Each process of torchrun would run alone.
    """
    if elastic(environ) and WORKER not in environ:
        raise UsageError(
            "horovodrun --min-np starts Horovod's own driver: type `hvd-train launch --elastic`"
        )
    size = whole_number(environ.get("WORLD_SIZE", "")) or 1
    ours = launched(environ)
    # A task of Slurm that runs torchrun is no rank.
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
        started = (
            f"WORLD_SIZE={size}: torchrun or another launcher started {size} processes, and "
            "each would run alone"
        )
        raise UsageError(f"{started}; type `{line}`, or `unset WORLD_SIZE` if no launcher set it")
    if alone and ours and ours.size > 1:
        one = f"this command runs alone: type `{shlex.join(command)}` without a launcher"
        raise UsageError(f"{ours.launcher} started {ours.size} processes, and {one}")


# Variables that the driver of an elastic job sets for the processes that it starts:
WORKER = "HVD_TRAIN_WORKER"  # a number, unique in the job for ever
SLOT = "HVD_TRAIN_SLOT"  # the worker's slot of its host (its GPU), for life
JOB = "HVD_TRAIN_JOB"  # a unique name
REPLACES = "HVD_TRAIN_REPLACES"  # the number of the worker that had the slot before
INTERFACES = "HVD_TRAIN_INTERFACES"  # network interfaces that the user named, if any
# the run folder that the job has claimed, which its later workers continue, or empty
RUN_DIR = "HVD_TRAIN_RUN_DIR"


def elastic(environ: Mapping[str, str]) -> bool:
    """Return whether this process is a worker of an elastic job."""
    return environ.get("HOROVOD_ELASTIC") == "1"


def started_with(variables: Mapping[str, str]) -> list["psutil.Process"]:
    """Return the other processes of this host whose environment had
    these variables at the start.
    """
    import psutil  # a host that only starts containers may lack it

    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # ended, a zombie, or another user's
            environment = process.environ()
            if process.pid != os.getpid() and variables.items() <= environment.items():
                found.append(process)
    return found


def kill_worker(number: str, job: str, leave_s: float = 0.0) -> None:
    """Kill this worker of this job on this host, with its data loader processes, unless
    it ends within `leave_s`.

    It would keep its GPU.
    """
    import psutil

    _, alive = psutil.wait_procs(started_with({WORKER: number, JOB: job}), timeout=leave_s)
    for process in alive:
        with suppress(psutil.Error):  # it has ended
            process.kill()


def program(name: str) -> str:
    """Return the path of a program next to this Python, or else on the PATH.

    Raises UsageError if there is none.
    """
    next_to_python = Path(sys.executable).with_name(name)
    found = str(next_to_python) if next_to_python.exists() else shutil.which(name)
    if found is None:
        raise UsageError(
            f"there is no {name} next to {sys.executable} or on the PATH: type `hvd-train doctor`"
        )
    return found


def reasons(output: str) -> list[str]:
    """Return the errors in the output of a job, the first one first."""
    return re.findall(r"(?:hvd-train: |\b(?=stopped by |[\w.]*(?:Error|Exception): ))(.*)", output)
