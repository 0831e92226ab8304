"""What is left of a worker that the job has given up: stopped, or cut off from its launcher, it would stay for ever."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from hvd_train.launch.launcher import JOB, REPLACES, WORKER


def clear_away(worker: str, job: str) -> None:
    """Kill the processes of this worker on this host, its loaders included."""
    marks = {f"{WORKER}={worker}".encode(), f"{JOB}={job}".encode()}
    for process, environment in _environments():
        if process != os.getpid() and marks <= environment:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)


def clear_away_predecessor(environ: Mapping[str, str]) -> None:
    """The one that this process replaces may still hold its GPU."""
    if REPLACES in environ:
        clear_away(environ[REPLACES], environ[JOB])


def _environments() -> Iterator[tuple[int, set[bytes]]]:
    """Processes of this user with what they were started with; none where there is no /proc."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            yield int(folder.name), set((folder / "environ").read_bytes().split(b"\0"))
