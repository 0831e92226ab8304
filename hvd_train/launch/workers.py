"""The workers of elastic jobs, each on its own host: their variables, what the driver requests of
them, and how one is killed. No torch.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import psutil

Request = Literal["train", "change", "stop"]
"""Train, form another world because hosts came or went, or stop."""

# Variables that the driver of an elastic job sets for the processes that it starts:
WORKER = "HVD_TRAIN_WORKER"  # a number, unique in the job for ever
SLOT = "HVD_TRAIN_SLOT"  # the worker's slot of its host (its GPU), for life
JOB = "HVD_TRAIN_JOB"  # a unique name
REPLACES = "HVD_TRAIN_REPLACES"  # the number of the worker that had the slot before
INTERFACES = "HVD_TRAIN_INTERFACES"  # network interfaces that the user named, if any
# the run folder that the job has claimed, which its later workers continue, or empty
RUN_DIR = "HVD_TRAIN_RUN_DIR"


_RANKS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


def rank_variables(numbers: Sequence[object]) -> dict[str, str]:
    """Return Horovod's variables for a rank, the size, and both locally and across hosts."""
    return {f"HOROVOD_{name}": str(number) for name, number in zip(_RANKS, numbers, strict=True)}


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


def kill(number: str, job: str, leave_s: float = 0.0) -> None:
    """Kill this worker of this job on this host, with its data loader processes, unless
    it ends within `leave_s`.

    It would keep its GPU.
    """
    import psutil

    _, alive = psutil.wait_procs(started_with({WORKER: number, JOB: job}), timeout=leave_s)
    for process in alive:
        with suppress(psutil.Error):  # it has ended
            process.kill()
