"""Commit from a survivor if both rank 0 and the driver of the job are lost."""

from __future__ import annotations

import os
import socket
import time
from datetime import datetime
from pathlib import Path

from hvd_train import checkpoint
from hvd_train.checkpoint import BadCheckpoint
from hvd_train.config import Config
from hvd_train.console import say
from hvd_train.errors import UsageError
from hvd_train.launch import launcher
from hvd_train.output import Claim, Output
from hvd_train.run_files import run_folder
from hvd_train.run_files.run_folder import Busy
from hvd_train.state import TrainState
from hvd_train.world.world import Place

_PATIENCE_S = 100.0  # a file server keeps the locks of a dead host for a while: NFS 4 for 90 s
_POLL_S = 0.2


def commit_for_all(output: Output, config: Config, state: TrainState, run_dir: Path) -> str:
    """Commit this rank's last step, unless another rank does, and return the outcome for the user.

    Survivors may call this at the same time and differ by one step. Each waits for the run folder and commits if the
    newest commit is older than its own step. No survivor takes the folder from a process that holds it: that may be the
    rest of the job, from which this rank alone is cut off, or a new run. If the process keeps the folder and does not
    commit this step, the state is written next to the commits, in a file that no run loads by itself.
    """
    path = checkpoint.path_of(run_dir, state.progress.step)
    named = config.replace(output_dir=run_dir, resume="auto")
    deadline = time.monotonic() + _PATIENCE_S
    damaged: set[Path] = set()
    while not _committed_by_another(path, damaged):
        try:
            folder = run_folder.claim(named, datetime.now(), owner=launcher.owner(os.environ))
        except Busy:
            if time.monotonic() > deadline:
                return _written_aside(path, config, state)
            time.sleep(_POLL_S)
            continue
        except UsageError as error:
            return f"NOT committed: {error}"
        output.open(Claim(folder), state, Place())
        if _committed_by_another(path, damaged):  # between the look and the lock
            break
        output.journal.catch_up(state.recent, state.last_step, state.last_epoch)
        if not output.commit_last(state):
            return "NOT committed (see above); the same command resumes from the last commit"
        output.journal.event(
            "rescued",
            f"rank 0 is gone: step {state.progress.step} is committed in {path} by {socket.gethostname()}; "
            "the same command resumes from there",
        )
        return f"committed in {path}; the same command resumes from there"
    return "committed by another rank; the same command resumes from there"


def _committed_by_another(path: Path, damaged: set[Path]) -> bool:
    """Return whether the run folder has a whole checkpoint of this path's step or a later one; add damaged ones."""
    for other in checkpoint.committed(path.parent.parent):
        if other.name >= path.name and other not in damaged:
            try:
                checkpoint.read(other)
            except BadCheckpoint:
                damaged.add(other)
            else:
                return True
    return False


def _written_aside(path: Path, config: Config, state: TrainState) -> str:
    aside = path.with_name(f"{path.stem}-of-{socket.gethostname()}-{os.getpid()}.ckpt")
    try:
        checkpoint.write(aside, {**state.snapshot(), "config": config.as_dict()})
    except OSError as error:
        return f"NOT committed: another process has the run folder, and {aside} cannot be written ({error.strerror})"
    say(f"another process has the run folder: step {state.progress.step} is in {aside}")
    return f"in {aside}, since another process has the run folder; where none does, `mv {aside} {path}` commits it"
