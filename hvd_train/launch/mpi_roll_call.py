"""The roll call over MPI, which itself waits for ranks busily and silently. No torch."""

import itertools
import json
import socket
import threading
import time
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hvd_train.console import say
from hvd_train.launch.launcher import Launch
from hvd_train.launch.roll_call import disagreement, error_for

_FIRST_NOTICE_S = 15.0  # doubles with each notice
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.05


def meets_over_mpi(environ: Mapping[str, str]) -> bool:
    """Return whether the ranks of this job rendezvous over MPI."""
    started_by_mpi = any(name in environ for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"))
    return started_by_mpi and environ.get("HOROVOD_CONTROLLER", "mpi") == "mpi"


def call(communicator: Any, facts: Mapping[str, str]) -> None:
    """Wait for all ranks of an mpi4py communicator. Raises UsageError on all if `facts` differ; rank 0 prints it."""
    come_together(communicator)
    texts = gathered(communicator, json.dumps({"host": socket.gethostname(), **facts}))
    if problem := disagreement([json.loads(text) for text in texts]):
        if communicator.rank == 0:
            say(problem)
        communicator.barrier()  # the job ends with the first rank that ends
        raise error_for(problem, by_rank_0=True)


def gathered(communicator: Any, text: str) -> list[str]:
    """Gather the texts of all ranks of an mpi4py communicator on each rank."""
    sent = text.encode()  # mpi4py's own gather sends pickles, which may run code when they are read
    lengths = array("q", [0]) * communicator.size
    communicator.Allgather(array("q", [len(sent)]), lengths)
    received = bytearray(sum(lengths))
    communicator.Allgatherv(sent, [received, lengths.tolist()])
    ends = itertools.accumulate(lengths)
    return [received[end - length : end].decode() for end, length in zip(ends, lengths, strict=True)]


def come_together(communicator: Any) -> None:
    """Wait, asleep, until all ranks of an mpi4py communicator are here.

    MPI waits busily: a finished rank would take the core from a rank that still trains. On some kernels (Linux 6.18)
    threads that yield in turn keep even threads that write files from running, for minutes.
    """
    all_here, pause = communicator.Ibarrier(), _SHORTEST_PAUSE_S
    while not all_here.Test():
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


@contextmanager
def reporting_the_wait(launched: Launch | None) -> Iterator[None]:
    """Print now and then that this rank is waiting while MPI waits inside this block; missing ranks do not print."""
    done = threading.Event()

    def report() -> None:
        waited = _FIRST_NOTICE_S
        while not done.wait(waited if waited == _FIRST_NOTICE_S else waited / 2):
            who = f"rank {launched.rank if launched else '?'} on {socket.gethostname()}"
            say(f"{who} has been waiting for other ranks for {waited:.0f} s; ranks without such a line are missing")
            waited *= 2

    threading.Thread(target=report, daemon=True, name="roll call").start()
    try:
        yield
    finally:
        done.set()
