"""The output of a training, which rank 0 writes into the run folder."""

import dataclasses
import io
import json
import os
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train import checkpoint, config_file
from hvd_train.checkpoint import Store
from hvd_train.config import Config
from hvd_train.console import say
from hvd_train.data import identity
from hvd_train.errors import UsageError
from hvd_train.launch import client, workers
from hvd_train.progress.order import BatchLayout, check_fits
from hvd_train.run_files import run_folder
from hvd_train.run_files.journal import Journal
from hvd_train.run_files.remote import Copies
from hvd_train.run_files.run_folder import Busy, Find, RunFolder
from hvd_train.state import Progress, Snapshot, TrainState, check_same_shapes
from hvd_train.world.world import Program

# workers whose driver has died may take as long to notice it, commit and leave the folder
_PATIENCE_SECONDS = 45.0
_ANSWER_SECONDS = 10.0  # a driver that does not answer for this long counts as gone
# They decide which samples are left in the epoch, how images are normalised, and what has a state.
_FIXED = (
    "seed",
    "order",
    "drop_last",
    "weights",
    "freeze",
    "unfreeze",
    "optimizer",
    "decay_of",
    "ema_decay",
)
_OF_GROUPS = ("optimizer_args", "learning_rate", "momentum", "nesterov", "weight_decay")
_OF_CUT = ("batch_size", "global_batch_size", "accumulation_steps", "on_resize")


class Output:
    """The run folder, journal and checkpoint store of a training; only rank 0 writes."""

    def __init__(
        self, config: Config, program: Program, name: str = "", replays: Path | None = None
    ) -> None:
        """Write nothing yet; a training that `replays` a finished run folder never does."""
        self._config = config
        self._program = program
        self._name = name
        self.replays = replays
        to = config.run.copy_to
        self._copy_to = f"{to}/{name}" if to and name else to
        self._folder: RunFolder | None = None
        self.journal = Journal()
        self.store: Store | None = None  # of rank 0
        self._copies: Copies | None = None  # to another file system, if the config says so

    @property
    def path(self) -> Path | None:
        """The run folder, or None on a rank that does not write."""
        return self._folder.path if self._folder else None

    def claim(
        self,
        state: TrainState,
        run_dir: Path | None,
        layout: BatchLayout,
        num_samples: int,
        *,
        from_disk: bool,
    ) -> RunFolder:
        """Take the run folder for rank 0 and, if `from_disk`, load the newest checkpoint.

        Without one, the state comes from the file that the user named, or is fresh with this
        layout. `run_dir` is the folder in which ranks of this world have trained. Raises
        UsageError, before a folder changes, if the folder belongs to another run or process, the
        file cannot be loaded, or the layout does not fit `num_samples`.
        """
        if self._folder is not None and not from_disk:
            return dataclasses.replace(self._folder, from_file=False)
        self.close()
        job = os.environ.get(workers.RUN_DIR)
        config = self._in_folder(run_dir, job)
        resumes = config.run.resume
        if self._copy_to and config.run.output_dir:
            folder = config.run.output_dir / self._name
            self._copies = Copies(self._copy_to, folder, say, new=resumes != "auto")
            if resumes != "never":
                self._copies.fetch()
        found = _Found(self._config, self._name, state, layout, num_samples)
        find = found.find if from_disk else lambda folder: None
        patience = _PATIENCE_SECONDS if run_dir is None and workers.elastic(os.environ) else 0.0
        ours = bool(run_dir or job)
        self._folder = claim = _claim(config, self._name, find, patience, ours=ours)
        if self._copies is not None:
            self._copies.begin(claim)
        if workers.WORKER in os.environ:
            self._report(claim.path)
        if found.snapshot is not None:
            load(state, found.snapshot)
        return dataclasses.replace(
            claim, notes=(*claim.notes, *found.notes), from_file=found.is_of_user
        )

    def _in_folder(self, run_dir: Path | None, job: str | None) -> Config:
        """Return the config with the folder that the job or the program has already, if any."""
        config = self._config
        home = Path(job) if job else self._program.folder
        if run_dir is not None:
            home = self._home(run_dir)
        of_program = home and self._name and not config.run.output_dir
        if run_dir or job or of_program:
            return config.replace(output_dir=home, resume="auto")
        return config

    def _home(self, folder: Path) -> Path:
        """Return the folder of the program, by the run folder of this training."""
        return folder.parent if self._name else folder

    def _report(self, folder: Path) -> None:
        """Tell the driver of an elastic job the folder, for later workers."""
        name = f"run_dir/{os.environ[workers.WORKER]}"
        with suppress(OSError):  # a driver that is gone starts no workers
            client.put(os.environ, name, str(self._home(folder)), _ANSWER_SECONDS)

    def replay(self, state: TrainState, folder: Path) -> None:
        """Load a checkpoint, or the last one in the folder of a finished run, without a claim.

        Raises UsageError.
        """
        if folder.is_file():
            load(state, checkpoint.read(folder))
            return
        if (snapshot := checkpoint.newest_good(folder, say)) is None:
            raise UsageError(f"{folder} is a finished run without a checkpoint that can be read")
        load(state, snapshot)

    def open(self, claim: RunFolder | None, state: TrainState) -> None:
        """Write into the claimed folder from now on; without a claim, write nothing."""
        if claim is None:
            self.close()
            return
        progress = state.progress
        run = self._config.run
        if self.store is None:
            journal = Journal(
                claim,
                progress.step,
                progress.epoch,
                ledger=run.ledger,
                log_to=run.trackers,
                settings=self._config.settings(),
            )
            for note in claim.notes:
                journal.event("note", note)
            if journal.steps_lost:
                lost = (
                    f"at least {journal.steps_lost} steps lost: the run resumes after "
                    f"step {progress.step}"
                )
                journal.event("lost", lost, steps_lost=journal.steps_lost)
            report = partial(journal.event, "checkpoint")
            committed = self._copies.start if self._copies else lambda: None
            self.store = Store(claim, self._config, report, committed)
            self.journal = journal
        assert self.store is not None
        if claim.from_file:
            self.store.commit(
                state, verified=True
            )  # if all ranks die now, the job does not need the file again
            text = f"resuming from {run.resume}"
            self.journal.event(run_folder.FROM_FILE, text, step=progress.step, epoch=progress.epoch)
        if state.best and (state.best.epoch, 0) == (progress.epoch, progress.cursor):
            self.store.save_weights(checkpoint.BEST, state)  # the rank that wrote these may be gone

    def commit_last(
        self, state: TrainState, *, final_weights: bool = False, verified: bool = False
    ) -> Future[bool]:
        """Commit as the store does; the result is False on a rank that does not write,
        unless it is on disk already.
        """
        if self.store is not None:
            return self.store.commit_last(state, final_weights=final_weights, verified=verified)
        return _done(result=self.replays is not None)

    def copy_last(self) -> Future[bool]:
        """Copy the last files to the URL; the result is whether they are there."""
        return _done(result=True) if self._copies is None else self._copies.finish()

    def write(self, name: str, values: Any) -> bool:
        """Write a file of the run folder, if there is one: an array as .npy, else as JSON;
        return False if that failed.
        """
        try:
            if self._folder is not None:
                self._folder.write_bytes(name, _content(values))
        except OSError as error:
            self.journal.event("note", f"cannot write {self.path}/{name}: {error.strerror}")
            return False
        return True

    def write_summary(self, values: Any) -> bool:
        """Complete the ledger, then write the summary, which marks the run as finished;
        return False if that failed.
        """
        return self.journal.complete() and self.write(run_folder.SUMMARY, values)

    def close(self) -> None:
        """Finish what is being written and give up the folder."""
        if self.store is not None:
            self.store.close()
        self.journal.close()
        if self._copies is not None:
            self._copies.close()
            self._copies = None
        if self._folder is not None:
            self._folder.release()
        self._folder = None
        self.journal = Journal()
        self.store = None


def _content(values: Any) -> bytes:
    if not isinstance(values, np.ndarray):
        return (json.dumps(values, indent=1) + "\n").encode()
    content = io.BytesIO()
    np.save(content, values)
    return content.getvalue()


def _done(*, result: bool) -> Future[bool]:
    nothing: Future[bool] = Future()
    nothing.set_result(result)
    return nothing


def finished(program: Path | None, config: Config, name: str) -> Path | None:
    """Return the folder of a run in the folder of its program, if it has finished with
    the settings of `config`.
    """
    folder = program and program / name
    if folder is None or not (folder / run_folder.SUMMARY).exists():
        return None
    return None if config.differences(config_file.load(folder / run_folder.CONFIG)) else folder


@dataclass
class _Found:
    """The state with which a training begins: the newest checkpoint of its folder, else the file
    that the user named, else the fresh state.
    """

    config: Config
    name: str
    state: TrainState
    layout: BatchLayout  # of a fresh state
    num_samples: int
    snapshot: Snapshot | None = None  # of the folder, to be loaded
    is_of_user: bool = False  # whether the named file is loaded
    notes: list[str] = field(default_factory=list)  # for the user

    def find(self, folder: Path | None) -> None:
        """Find the checkpoint of a run in its folder; else load the named file, or choose
        the layout.

        Raises UsageError if a file cannot be loaded, or the layout does not fit.
        """
        note = self.notes.append
        resume = self.config.run.resume
        self.snapshot = checkpoint.newest_good(folder, note) if folder else None
        if self.snapshot is not None and not self.snapshot.get("verified", True):
            step = self.snapshot["progress"]["step"]
            note(f"step {step} was committed after a fault, by one rank alone")
        self.is_of_user = self.snapshot is None and resume not in ("auto", "never")
        if self.is_of_user:
            path = Path(resume, self.name)
            is_run = path.is_dir()
            of_user = checkpoint.newest_good(path, note) if is_run else checkpoint.read(path)
            if of_user is None:
                raise UsageError(f"--resume {path}: it has no checkpoint")
            load(self.state, self._adapted(of_user))
        elif self.snapshot is None:
            self.state.change_layout(check_fits(self.layout, self.num_samples))

    def _adapted(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot in the named file with the settings of this run; note what differs.

        Raises UsageError for another model, for settings that cannot change, and for a layout that
        does not fit.
        """
        config = self.config
        state = self.state
        file = config.run.resume
        progress = Progress(**snapshot["progress"])
        old = config_file.from_dict(snapshot["config"], source=file)
        differences = config.differences(old)
        # the order of these samples follows the layout, which would change within an epoch
        fixed_names = (*_FIXED, *(_OF_CUT if config.batch.length_buckets else ()))
        if fixed := [line for line in differences if line.partition(":")[0] in fixed_names]:
            again = "start a new run from weights: --weights FILE in place of --resume"
            raise UsageError(
                f"--resume {file}: its run cannot continue with other settings "
                f"({'; '.join(fixed)}); {again}"
            )
        begun = progress.epoch + bool(progress.cursor)
        epochs = config.schedule.epochs
        if begun > epochs:
            raise UsageError(
                f"--epochs {epochs}: {file} is of epoch {begun}: type --epochs {begun} or more"
            )
        check_same_shapes(state.model, snapshot["model"])
        mine = config.settings()
        theirs = old.settings()
        changed = dict[str, Any](best=None)  # the best weights are not in the file
        if differences:
            self.notes.append(
                f"other settings than in {file} hold from here on: {'; '.join(differences)}"
            )
        if any(mine[name] != theirs[name] for name in _OF_CUT):
            changed["layout"] = dataclasses.asdict(check_fits(self.layout, self.num_samples))
        if any(mine[name] != theirs[name] for name in _OF_GROUPS):
            # else they are set last, over the new ones
            changed["point"] = {**snapshot["point"], "settings": []}
            changed["optimizers"] = {}
            for name in snapshot["optimizers"].keys() & state.optimizers.keys():
                saved = snapshot["optimizers"][name]
                groups = zip(
                    saved["param_groups"],
                    state.optimizers[name].state_dict()["param_groups"],
                    strict=False,
                )
                changed["optimizers"][name] = {
                    **saved,
                    "param_groups": [theirs | own for theirs, own in groups],
                }
        return {**snapshot, **changed}


def load(state: TrainState, snapshot: Snapshot) -> None:
    """Load a checkpoint, but keep the data of `state`.

    Raises UsageError if the checkpoint's data differ.
    """
    data = state.data
    earlier = snapshot["data"]
    if changes := "; ".join(identity.differences(data, earlier).values()):
        raise UsageError(
            f"{changes}; type --resume never to start again, or start a new run from the "
            "weights: --weights FILE"
        )
    state.load({**snapshot, "data": data or earlier})


def _claim(config: Config, name: str, find: Find, patience: float, *, ours: bool) -> RunFolder:
    """Return the run's folder when it is free.

    Another process that has it may be about to commit and end; after `patience` seconds it may not
    write any more if the folder is `ours`. Raises as `run_folder.claim` does.
    """
    deadline = time.monotonic() + patience
    waits = False
    while True:
        wait = time.monotonic() < deadline
        evict = ours and not wait
        try:
            return run_folder.claim(config, datetime.now(), find, name=name, wait=wait, evict=evict)
        except Busy as busy:
            if not wait:
                raise
            if not waits:
                say(
                    f"another process is training in {busy.path}: waiting {patience:.0f} "
                    "s at most for its end"
                )
                waits = True
            time.sleep(0.05)
