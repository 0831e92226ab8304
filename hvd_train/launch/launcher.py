"""What the environment of a process says about its launcher, its rank and its job. No torch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvd_train.errors import UsageError
from hvd_train.numerals import whole_number

# Launcher, variable of the rank, variable of the size. Horovod's own come first: horovodrun over MPI sets both.
_VARIABLES = (
    ("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPICH", "PMI_RANK", "PMI_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # not SLURM_NTASKS, which a batch script has as well
)


@dataclass(frozen=True)
class Launch:
    """The rank of one process in the group that a launcher started."""

    launcher: str
    rank: int
    size: int


def launched(environ: Mapping[str, str]) -> Launch | None:
    """Return the rank that a launcher gave to this process, or None if it was started alone."""
    for launcher, rank, size in _VARIABLES:
        number, count = whole_number(environ.get(rank, "")), whole_number(environ.get(size, ""))
        if number is not None and count is not None:
            return Launch(launcher, number, count)
    return None


def refuse_others(environ: Mapping[str, str], command: Sequence[str]) -> None:
    """Raise UsageError if Horovod's own elastic driver started this process, or torchrun or the like several of them.

    Of torchrun's processes each would run `command` alone. A job of ours may have its variables as well. A task of
    Slurm that runs torchrun is no rank.
    """
    if elastic(environ) and WORKER not in environ:
        raise UsageError(
            "horovodrun --min-np starts Horovod's own elastic driver, under which hvd-train cannot run: type "
            "`horovodrun_scripts/train_elastic.sh`, or leave out --min-np and --host-discovery-script"
        )
    size, ours = whole_number(environ.get("WORLD_SIZE", "")) or 1, launched(environ)
    in_task = ours is not None and ours.launcher == "srun" and ours.size != size and "LOCAL_RANK" in environ
    if size > 1 and (ours is None or in_task):
        raise UsageError(
            f"WORLD_SIZE={size}: torchrun or another launcher started {size} processes, and each would run alone; "
            f"type `horovodrun -np {size} {shlex.join(command)}`, or `unset WORLD_SIZE` if no launcher set it"
        )


def by_open_mpi(environ: Mapping[str, str]) -> bool:
    """Return whether Open MPI started this process, through mpirun or through horovodrun."""
    return "OMPI_COMM_WORLD_SIZE" in environ


# What the driver of elastic jobs, or its supervisor, gives to the processes that it starts:
WORKER = "HVD_TRAIN_WORKER"  # a number that no other process of the job has or had
SLOT = "HVD_TRAIN_SLOT"  # which slot of its host (which GPU) is the worker's for life
JOB = "HVD_TRAIN_JOB"  # a name that no other job has
OWNER = "HVD_TRAIN_OWNER"  # a name that the job keeps when its driver is started again: its run folder has it
REPLACES = "HVD_TRAIN_REPLACES"  # the number of the worker that had the slot before
SUPERVISOR = "HVD_TRAIN_SUPERVISOR"  # the id of the supervisor; without it the driver ends
STARTED = "HVD_TRAIN_STARTED"  # when the job started, by time.monotonic of the supervisor's host, where the driver is
SPENT = "HVD_TRAIN_SPENT"  # how many seconds old the job was when it started this process: its workers come and go
DRIVER_ADDRESSES = "HVD_TRAIN_DRIVER_ADDRESSES"  # where the driver may be reached, the likeliest address first
INTERFACES = "HVD_TRAIN_INTERFACES"  # the network interfaces that the user has named, if any
GOES_ON = "HVD_TRAIN_GOES_ON"  # "1" if the process continues a job, so that `--resume never` no longer holds

TIMELINE, ON_DEMAND = "HOROVOD_TIMELINE", "DYNAMIC"  # when ranks meet, all of them must have this variable, or none


def elastic(environ: Mapping[str, str]) -> bool:
    """Return whether this process is a worker of an elastic job, in which ranks come and go."""
    return environ.get("HOROVOD_ELASTIC") == "1"


def goes_on(environ: Mapping[str, str]) -> bool:
    """Return whether this process continues a job: it takes the place of a worker or of a launcher that ended."""
    return environ.get(GOES_ON) == "1"


def owner(environ: Mapping[str, str]) -> str:
    """Return the name under which this process's job owns its run folder; empty outside elastic jobs."""
    return environ.get(OWNER, "")


def running_for(environ: Mapping[str, str], age_s: float) -> float:
    """Return the seconds since this process's job started; 0 if the job starts with it. `age_s` is the process's."""
    return float(environ[SPENT]) + age_s if SPENT in environ else 0.0


def slot(environ: Mapping[str, str]) -> int:
    """Return the slot of its host that this process has for life, or its local rank outside elastic jobs; 0 without."""
    return whole_number(environ.get(SLOT, environ.get("HOROVOD_LOCAL_RANK", ""))) or 0
