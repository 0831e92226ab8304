"""Kills what is left of a worker that the job has given up.

A worker that is stopped, or cut off from its launcher, would stay for ever and keep the GPU that its successor in the
same slot needs. But it may also be the one that has the run's last steps, and commits them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

import psutil

from hvd_train.launch import processes
from hvd_train.launch.launcher import JOB, REPLACES, WORKER

_POLL_S = 0.1
_LEAVE_S = 5.0
_WRITE_S = 600.0
_UNFINISHED = ".partial"  # how the name of a file ends while it is written (run_files/durable.py)
_AT_REST = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def kill_worker(number: str, job: str) -> None:
    """Kill the processes of this worker of this job on this host, including its data loader processes."""
    for process in processes.started_with({WORKER: number, JOB: job}):
        with suppress(psutil.Error):  # it has ended meanwhile
            process.kill()


def kill_predecessor(environ: Mapping[str, str], leave_s: float = _LEAVE_S) -> None:
    """Kill the worker that the current process replaces, if `environ`, its environment, names one.

    A worker that lost its launcher may be about to commit and exit, so it gets a grace period of `leave_s` seconds.
    The period starts again each time the worker is seen writing a file, for ten minutes at most. A stopped worker is
    killed at once.
    """
    if REPLACES not in environ:
        return
    left = processes.started_with({WORKER: environ[REPLACES], JOB: environ[JOB]})
    begun = time.monotonic()
    idle_since = dict.fromkeys(left, begun)
    while any(_is_leaving(process, begun, idle_since, leave_s) for process in left):
        time.sleep(_POLL_S)
    kill_worker(environ[REPLACES], environ[JOB])


def _is_leaving(process: psutil.Process, begun: float, idle_since: dict[psutil.Process, float], leave_s: float) -> bool:
    """Return whether `process` may still exit by itself; note in `idle_since` when it was last seen writing."""
    now = time.monotonic()
    try:
        if process.status() in _AT_REST:
            return False
        if any(file.path.endswith(_UNFINISHED) for file in process.open_files()):
            idle_since[process] = now
            return now - begun < _WRITE_S
        return now - idle_since[process] < leave_s
    except psutil.Error:  # it has ended
        return False
