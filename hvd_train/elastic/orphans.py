"""Kills what is left of a worker that the job has given up.

A worker that is stopped, or cut off from its launcher, would stay for ever and keep the GPU that its successor in the
same slot needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import psutil

from hvd_train.launch import processes
from hvd_train.launch.launcher import JOB, REPLACES, WORKER


def kill_worker(number: str, job: str) -> None:
    """Kill the processes of this worker of this job on this host, including its data loader processes."""
    for process in processes.started_with({WORKER: number, JOB: job}):
        with suppress(psutil.Error):  # it has ended meanwhile
            process.kill()


def kill_predecessor(environ: Mapping[str, str]) -> None:
    """Kill the worker that the current process replaces, where `environ`, its environment, names one."""
    if REPLACES in environ:
        kill_worker(environ[REPLACES], environ[JOB])
