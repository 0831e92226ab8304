"""Kill the processes of evicted workers, which would keep the GPU of their slot."""

from collections.abc import Mapping
from contextlib import suppress

import psutil

from hvd_train.launch import processes
from hvd_train.launch.launcher import JOB, REPLACES, WORKER

_LEAVE_S = 5.0


def kill_worker(number: str, job: str) -> None:
    """Kill this worker of this job on this host, with its data loader processes."""
    for process in processes.started_with({WORKER: number, JOB: job}):
        with suppress(psutil.Error):  # it has ended
            process.kill()


def kill_predecessor(environ: Mapping[str, str], leave_s: float = _LEAVE_S) -> None:
    """Kill the earlier worker of this slot, unless it ends within `leave_s` seconds.

    `environ` names it, if there is one. It may be writing a commit, which is atomic.
    """
    if REPLACES in environ:
        earlier = processes.started_with({WORKER: environ[REPLACES], JOB: environ[JOB]})
        psutil.wait_procs(earlier, timeout=leave_s)
        kill_worker(environ[REPLACES], environ[JOB])
