"""The commit of a rank that does not write, where the rank that does is gone, and with it the driver of the job."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from hvd_train import checkpoint, remote_url
from hvd_train.checkpoint import BadCheckpoint
from hvd_train.config import Config
from hvd_train.console import say
from hvd_train.errors import UsageError
from hvd_train.output import Output
from hvd_train.run_files import remote
from hvd_train.run_files.remote import Remote
from hvd_train.run_files.run_folder import Busy
from hvd_train.state import TrainState
from hvd_train.world.world import Place

_PATIENCE_S = 100.0  # a file server keeps the locks of a dead host for a while: NFS 4 for 90 s
_POLL_S = 0.2
_PATIENCE_AT_URL_S, _POLL_AT_URL_S = 30.0, 2.0


def commit_for_all(output: Output, config: Config, state: TrainState, run_dir: Path) -> str:
    """See to it that this rank's last step is on disk, and return in words what has become of it.

    Survivors may come at the same time and differ by one step. Each takes the run folder in its turn, and writes where
    the newest commit there is of an earlier step than its own. Nobody takes the folder from a process that has it:
    that may be the rest of a job from which this rank alone is cut off, or a new run. Where it stays so, and no commit
    of this step comes, the state is written beside the commits, under a name that no run takes by itself.
    """
    if (url := remote_url.url_of(run_dir)) and _copied_by_another(url, state.progress.step):
        return "committed by another rank; the same command goes on from there"
    path = checkpoint.path_of(remote_url.working_folder(run_dir), state.progress.step)
    deadline = time.monotonic() + _PATIENCE_S
    damaged: set[Path] = set()
    while not _committed_by_another(path, damaged):
        try:
            claim = output.claim_unheld(run_dir)
        except Busy:
            if time.monotonic() > deadline:
                return _written_aside(path, config, state)
            time.sleep(_POLL_S)
            continue
        except UsageError as error:
            return f"NOT committed: {error}"
        output.open(claim, state, Place())
        if _committed_by_another(path, damaged):  # between the look and the lock
            break
        output.journal.catch_up(state.recent, state.last_step, state.last_epoch)
        if not output.commit_last(state):
            return "NOT committed (see above); the same command goes on from the last commit"
        output.journal.event(
            "rescued",
            f"rank 0 is gone: step {state.progress.step} is committed in {path} by {socket.gethostname()}; "
            "the same command goes on from there",
        )
        return f"committed in {path}; the same command goes on from there"
    return "committed by another rank; the same command goes on from there"


def _copied_by_another(url: str, step: int) -> bool:
    """Return whether a commit of this step or a later one is at a URL; rank 0 has a while to copy it, if it lives."""
    deadline = time.monotonic() + _PATIENCE_AT_URL_S
    while (left := deadline - time.monotonic()) > 0:
        with suppress(Exception):  # a service that does not answer has nothing to say
            place = Remote(url)
            if remote.within(left, lambda: max(commit.step for commit in place.commits(lambda _: None))) >= step:  # noqa: B023
                return True
        time.sleep(_POLL_AT_URL_S)
    return False


def _committed_by_another(path: Path, damaged: set[Path]) -> bool:
    """Return whether the run folder has a whole checkpoint of this path's step or a later one; note damaged ones."""
    for other in checkpoint.committed(path.parent.parent):
        if other.name >= path.name and other not in damaged:
            try:
                checkpoint.check(other)
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
