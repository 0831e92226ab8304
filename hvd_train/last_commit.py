"""Commit from a survivor if both rank 0 and the driver of the job are lost."""

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
_RESUME = "the same command resumes from there"


def commit_for_all(output: Output, config: Config, state: TrainState, run_dir: Path) -> str:
    """Commit this rank's last step, unless another rank does; return the outcome.

    Survivors may call this at the same time and differ by one step. Each waits for the run folder and commits if the
    newest commit is older than its own step. A process that holds the folder may be the rest of the job, or a new run.
    If it keeps the folder and does not commit this step, the state is written next to the commits, in a file that no
    run loads by itself.
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
        if _committed_by_another(path, damaged):  # before this rank had the lock
            break
        output.journal.catch_up(state.recent, state.last_step, state.last_epoch)
        if not output.commit_last(state):
            return "NOT committed (see above); the same command resumes from the last commit"
        line = f"rank 0 is gone: step {state.progress.step} is committed in {path} by {socket.gethostname()}; {_RESUME}"
        output.journal.event("rescued", line)
        return f"committed in {path}; {_RESUME}"
    return f"committed by another rank; {_RESUME}"


def _committed_by_another(path: Path, damaged: set[Path]) -> bool:
    """Return whether a whole checkpoint of this step or a later one exists; add to `damaged`."""
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
    return f"in {aside}, since another process has the run folder; once it is free, `mv {aside} {path}` commits it"
