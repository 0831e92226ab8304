"""Lets other processes of the same user ask this one where its threads are, whatever it hangs in. No torch.

Python's `faulthandler` writes the stacks of all threads from within a signal handler that is C alone: that needs
neither the GIL nor ptrace. They go into a file in memory, as the record of `progress.whereabouts` does, which others
open by way of /proc/PID/fd. Nothing of it lies in a folder, so nothing is left of a process that is killed, nobody can
plant anything in its place, and nobody but this user and root can read it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import mmap
import os
import signal
from pathlib import Path

from hvd_train.launch import rank_log
from hvd_train.progress.whereabouts import SIZE, here

ASKED = signal.SIGRTMAX - 6
"""The signal by which `hvd-train why` asks. SIGUSR2 may be somebody else's: a Java machine, as hdfs:// has it, suspends
its threads by it, and sending it to such a process would break that."""
RECORD, STACKS = "hvd_train-record", "hvd_train-stacks"
"""The names of the files in memory."""
_files: list[int] = []


def answer_why() -> None:
    """Let this process answer from here on; a second call does nothing.

    At SIGUSR2 the stacks are written to this rank's log, else to standard error, unless somebody has taken that signal
    before: a handler of the user's own stays, and one that is set later takes the place of this. Where the system has
    no files in memory, the process does not answer.
    """
    if _files:
        return
    with contextlib.suppress(OSError):
        record = os.memfd_create(RECORD)
        _files.append(record)
        os.ftruncate(record, SIZE)
        here.move_to(mmap.mmap(record, SIZE))
        answer_stacks()
        if not _is_taken(signal.SIGUSR2):
            faulthandler.register(signal.SIGUSR2, file=rank_log.number(), all_threads=True, chain=False)


def answer_stacks(_: int = 0) -> None:
    """Let this process tell its stacks alone, as loader processes do, which get their number."""
    with contextlib.suppress(OSError):
        stacks = os.memfd_create(STACKS)
        _files.append(stacks)
        # Whoever asks empties the file first.
        fcntl.fcntl(stacks, fcntl.F_SETFL, fcntl.fcntl(stacks, fcntl.F_GETFL) | os.O_APPEND)
        faulthandler.register(ASKED, file=stacks, all_threads=True, chain=False)


def _is_taken(number: int) -> bool:
    """Return whether a handler is set for a signal, or it is ignored; C code can do that without Python knowing."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    masks = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigCgt:", "SigIgn:"))]
    return any(mask >> (number - 1) & 1 for mask in masks)
