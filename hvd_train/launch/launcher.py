"""What a launcher says about this process in its environment; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Launcher, variable of the rank, variable of the size. Horovod's own come first: horovodrun over MPI sets both.
_VARIABLES = (
    ("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPICH", "PMI_RANK", "PMI_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # not SLURM_NTASKS, which a batch script has as well
)


@dataclass(frozen=True)
class Launch:
    """One process of a launched group."""

    launcher: str
    rank: int
    size: int


def launched(environ: Mapping[str, str]) -> Launch | None:
    """The group a launcher has put this process in, or None when it was started alone."""
    for launcher, rank, size in _VARIABLES:
        if environ.get(rank, "").isdigit() and environ.get(size, "").isdigit():
            return Launch(launcher, int(environ[rank]), int(environ[size]))
    return None


def by_open_mpi(environ: Mapping[str, str]) -> bool:
    """Whether this is a rank of Open MPI's, be it by mpirun or by horovodrun."""
    return "OMPI_COMM_WORLD_SIZE" in environ


# What our driver of elastic jobs says to a process it starts: a number that no other process of the job has ever had,
# and which of the host's places (GPUs) is its own for life.
WORKER, SLOT = "HVD_TRAIN_WORKER", "HVD_TRAIN_SLOT"
JOB = "HVD_TRAIN_JOB"  # tells this job from all others
REPLACES = "HVD_TRAIN_REPLACES"  # the number of the one that had the place before
SUPERVISOR = "HVD_TRAIN_SUPERVISOR"  # the process without which the driver is not to go on
STARTED = "HVD_TRAIN_STARTED"  # when the job was, by the clock (seconds since 1970): its workers come and go
GOES_ON = "HVD_TRAIN_GOES_ON"  # this process is not of the command's first start: `--resume never` has been done

TIMELINE, ON_DEMAND = "HOROVOD_TIMELINE", "DYNAMIC"  # all ranks must have it when they meet, or none


def elastic(environ: Mapping[str, str]) -> bool:
    """Whether the ranks of this job may come and go."""
    return environ.get("HOROVOD_ELASTIC") == "1"


def goes_on(environ: Mapping[str, str]) -> bool:
    """Whether the command that started this process is given again, by itself, to go on where it broke off."""
    return environ.get(GOES_ON) == "1"


def running_for(environ: Mapping[str, str], now: float) -> float:
    """Seconds for which the job has been running that this process is part of; 0 where it has just begun."""
    return max(0.0, now - float(environ[STARTED])) if STARTED in environ else 0.0


def slot(environ: Mapping[str, str]) -> int:
    """Which of its host's places a process of an elastic job has."""
    return int(environ.get(SLOT, environ.get("HOROVOD_LOCAL_RANK", "0")))
