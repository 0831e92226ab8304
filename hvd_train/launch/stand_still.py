"""Tells, before Horovod's limit ends a job that hangs, where this rank is and for whom the others wait. No torch."""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hvd_train.console import say
from hvd_train.launch import rank_log
from hvd_train.progress.whereabouts import Whereabouts, here

STALL = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
_STALL_S = 600.0  # unless that variable says otherwise, as `horovod_world` has it
_PART = 0.8  # of that time, after which this is told
_LOOK_S = 5.0
_AFTER_RANK_0_S = 15.0
_WHY_S = 60.0
_OF_RANKS = ("HOROVOD_", "HVD_TRAIN_", "OMPI_", "PMI", "SLURM_", "MPI")


@dataclass(frozen=True)
class _Told:
    """What the watching thread is told by each new world."""

    rank: int
    run: Path | None


_told: list[_Told] = []
_ended = threading.Event()


def watch(rank: int, run: Path | None, environ: Mapping[str, str]) -> None:
    """Watch from here on whether this process, `rank` of a job that trains in the folder `run`, goes on."""
    begins = not _told
    _told[:] = [_Told(rank, run)]
    if begins:
        _ended.clear()
        threading.Thread(target=_watch, args=(limit_s(environ),), daemon=True, name="stand still").start()


def end() -> None:
    """Watch no more: the training is over."""
    _told.clear()
    _ended.set()


def limit_s(environ: Mapping[str, str]) -> float:
    """Return after how many seconds without a sign of life a rank tells where it is: before Horovod ends the job."""
    stall_s = 0.0
    with suppress(ValueError):
        stall_s = float(environ.get(STALL, ""))
    return _PART * (stall_s if stall_s > 0 else _STALL_S)


def _watch(limit: float) -> None:
    told_of = 0
    while not _ended.wait(min(_LOOK_S, limit / 10)):
        seen = here.read()
        since = max(seen.phase_since, seen.waits_since)
        if since != told_of and (time.monotonic_ns() - since) / 1e9 > limit:
            told_of = since
            for told in tuple(_told):
                _tell(seen, (time.monotonic_ns() - since) / 1e9, told)


def _tell(seen: Whereabouts, seconds: float, told: _Told) -> None:
    """Write down where this rank is and, on one of those that wait for the others, for whom they do."""
    doing = f"waited for other ranks in {seen.waits_for}" if seen.waits_for else f"been in the phase {seen.phase!r}"
    say(
        f"rank {told.rank} on {socket.gethostname()} has {doing} for {seconds:.0f} s (step {seen.step}); its stacks "
        f"{'follow' if rank_log.number() == 2 else 'are in its log'}"
    )
    faulthandler.dump_traceback(file=rank_log.number(), all_threads=True)
    # Rank 0 asks about all; where it does not wait itself, or is stopped, rank 1 does.
    if not seen.waits_for or told.run is None or told.rank not in (0, 1):
        return
    if not _ended.wait(told.rank * _AFTER_RANK_0_S) and here.read() == seen:
        _ask(told.run, told.rank)


def _ask(run: Path, rank: int) -> None:
    # Without what tells a rank that it is one: this process is another, and has no last word for a driver.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_RANKS)}
    command = [sys.executable, "-m", "hvd_train", "why", str(run), "--json"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=_WHY_S, env=environment
        )
        seen = json.loads(done.stdout)
        if rank == 0 or not seen["ranks"][0]["waits_in"]:
            say(f"why this job does not go on: {seen['answer']}")
    except (OSError, ValueError, KeyError, IndexError, TypeError, subprocess.TimeoutExpired):
        say(f"why this job does not go on is not known; on its host: hvd-train why {run}")
