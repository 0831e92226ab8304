"""The output of a training, which rank 0 writes into the run folder."""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from hvd_train import checkpoint, from_file
from hvd_train.checkpoint import DiskStore, Store
from hvd_train.config import Config
from hvd_train.console import say
from hvd_train.data import identity
from hvd_train.data.identity import Identity
from hvd_train.errors import UsageError
from hvd_train.launch import launcher
from hvd_train.progress.order import BatchLayout
from hvd_train.run_files import machine, run_folder
from hvd_train.run_files.journal import Journal, RunJournal
from hvd_train.run_files.run_folder import Busy, RunFolder
from hvd_train.state import Snapshot, TrainState
from hvd_train.world.world import Place

_PATIENCE_SECONDS = 45.0  # workers whose driver has died may take as long to notice it, commit and leave the folder


@dataclass(frozen=True)
class Claim:
    """A run folder that rank 0 has for itself, before anything is written into it."""

    folder: RunFolder
    notes: tuple[str, ...] = ()  # for the user
    loaded: bool = False  # whether a checkpoint was loaded, from the folder or from the file that the user named
    from_file: bool = False  # whether it was the file, so that the folder has no commit yet


class Output:
    """The run folder, journal and checkpoint store of a training; only rank 0 writes."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._folder: RunFolder | None = None
        self.journal: Journal = Journal()
        self.store: Store = Store()

    @property
    def path(self) -> Path | None:
        """The run folder, or None on a rank that does not write."""
        return self._folder.path if self._folder else None

    def claim(
        self, state: TrainState, run_dir: Path | None, first_layout: Callable[[], BatchLayout], *, from_disk: bool
    ) -> Claim:
        """Take the run folder for rank 0 and, if `from_disk`, load the newest checkpoint.

        Without one, the state comes from the file that the user named, or is fresh with `first_layout()`. `run_dir` is
        the folder in which the job has been training. Raises UsageError, before a folder changes, if the folder belongs
        to another run or process or the file cannot be loaded, and what `first_layout` raises.
        """
        if self._folder is not None:
            if not from_disk:
                return Claim(self._folder)
            self.close()
        config, notes = self._config, list[str]()
        named = Path(config.run.resume) if config.run.resume not in ("auto", "never") else None
        if run_dir is not None:
            config = config.replace(output_dir=run_dir, resume="auto")

        def start() -> None:
            if from_disk and named is not None:
                adapted, more = from_file.adapted(checkpoint.read(named), state, self._config, first_layout)
                notes.extend(more)
                self._load(state, adapted, notes)
            elif from_disk:
                state.layout = first_layout()

        folder = _claim(config, start, abandoned=run_dir is not None)
        snapshot = checkpoint.newest_good(folder.path, notes.append) if from_disk and folder.earlier else None
        if snapshot is not None:
            self._load(state, snapshot, notes)
        elif folder.earlier:
            start()
        by_name = from_disk and snapshot is None and named is not None
        return Claim(folder, tuple(notes), loaded=snapshot is not None or by_name, from_file=by_name)

    def _load(self, state: TrainState, snapshot: Snapshot, notes: list[str]) -> None:
        """Load a checkpoint, but keep the data of `state`. Raises UsageError if the checkpoint's data differ."""
        data, earlier = state.data, snapshot["data"]
        changes = "; ".join(identity.differences(data, earlier).values())
        fits = not (data and earlier) or len(data["classes"]) == len(earlier["classes"])
        if changes and not (fits and self._config.run.data_changed):
            other = ", or --data-changed to begin the next epoch with the new data" if fits else ""
            raise UsageError(f"{changes}; type --resume never to start again{other}")
        state.load(snapshot)
        state.data = data or earlier
        if data and earlier and changes:
            state.change_data(earlier, data)
            notes.append(f"the data have changed: {changes}")

    def open(self, claim: Claim | None, state: TrainState, place: Place) -> None:
        """Write into the claimed folder from now on; without a claim, write nothing."""
        if claim is None:
            self.close()
            return
        progress, run = state.progress, self._config.run
        if self._folder is None:
            self._folder = claim.folder
            bar = shows_bar(self._config, place)
            journal = RunJournal(claim.folder, progress.step, progress.epoch, live=bar, ledger=run.ledger)
            for note in (*claim.folder.notes, *claim.notes):
                journal.event("note", note)
            if journal.steps_lost:
                lost = f"at least {journal.steps_lost} steps lost: the run resumes after step {progress.step}"
                journal.event("lost", lost, steps_lost=journal.steps_lost)
            report = partial(journal.event, "checkpoint")
            self.store = DiskStore(claim.folder, run.keep_checkpoints, self._config.as_dict(), report)
            self.journal = journal
        if claim.from_file:
            self.store.commit(state)  # if all ranks die now, the job does not need the file again
            text = f"resuming from {run.resume}"
            self.journal.event(run_folder.FROM_FILE, text, step=progress.step, epoch=progress.epoch)
        if state.best and (state.best.epoch, 0) == (progress.epoch, progress.cursor):
            self.store.save_weights(checkpoint.BEST, state)  # the rank that wrote these may be gone

    def commit_last(self, state: TrainState) -> bool:
        """Commit, unless another process took the folder; return whether it is on disk."""
        return self._folder is not None and self._folder.held() and self.store.commit_last(state).result()

    def write_surroundings(self, hosts: Sequence[str], gpu: str | None, data: Identity | None = None) -> None:
        """Write the host of each rank, the name of this rank's GPU, and the data."""
        if self._folder is None or not self._folder.held():
            return
        try:
            machine.write(self._folder, hosts, gpu)
            self._folder.write(run_folder.DATA, json.dumps(data) + "\n")
        except OSError as error:
            self.journal.event("note", f"cannot write {run_folder.ENVIRONMENT}: {error.strerror}")

    def write_summary(self, values: dict[str, Any]) -> bool:
        """Write how the run ended; return False if that failed."""
        if self._folder is None:
            return True
        try:
            self._folder.write(run_folder.SUMMARY, json.dumps(values, indent=2) + "\n")
        except OSError as error:
            self.journal.event("summary", f"cannot write {self._folder.path / run_folder.SUMMARY}: {error.strerror}")
            return False
        return True

    def close(self) -> None:
        """Finish what is being written and give up the folder."""
        self.store.close()
        self.journal.close()
        if self._folder is not None:
            self._folder.release()
        self._folder, self.journal, self.store = None, Journal(), Store()


def _claim(config: Config, start: Callable[[], None], *, abandoned: bool) -> RunFolder:
    """Return the run's folder when it is free; call `start` before a new one is made.

    `abandoned`: this job has formed a world without the process that has it, which must not write any more. Workers of
    a dead driver do write: they end with a commit, which this waits for.
    """
    owner = launcher.owner(os.environ)
    patience = 0.0 if abandoned or not launcher.elastic(os.environ) else _PATIENCE_SECONDS
    deadline, waits = time.monotonic() + patience, False
    while True:
        wait = time.monotonic() < deadline
        try:
            return run_folder.claim(config, datetime.now(), start, owner=owner, wait=wait)
        except Busy as busy:
            if wait:
                if not waits:
                    say(f"another process is training in {busy.path}: waiting {patience:.0f} s at most for its end")
                    waits = True
                time.sleep(0.05)
            elif abandoned or run_folder.belongs_to(busy.path, owner):
                run_folder.take_over(busy.path, owner)
            else:
                raise


def shows_bar(config: Config, place: Place) -> bool:
    """Return whether progress is shown as a live bar."""
    if config.run.progress == "auto":  # launchers forward whole lines, and Open MPI always gives ranks a terminal
        return place.size == 1 and sys.stdout.isatty() and not launcher.by_open_mpi(os.environ)
    return config.run.progress == "bar"
