"""What a training writes: on rank 0 into the run folder, which it has for itself; on other ranks nothing."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from hvd_train import checkpoint, remote_url
from hvd_train.checkpoint import DiskStore, NoStore, Store
from hvd_train.config import Config
from hvd_train.console import say
from hvd_train.errors import HvdTrainError, UsageError
from hvd_train.launch import launcher
from hvd_train.launch.seat import Seat
from hvd_train.progress.order import Cut
from hvd_train.run_files import copies, durable, machine, ranks_file, remote, run_folder
from hvd_train.run_files.copies import Copies
from hvd_train.run_files.journal import Journal, RunJournal, SilentJournal
from hvd_train.run_files.remote import Remote
from hvd_train.run_files.run_folder import Busy, RunFolder
from hvd_train.state import Snapshot, TrainState
from hvd_train.world.world import Place

# Workers whose driver has died may take as long to notice it, to commit and to leave the run folder.
_PATIENCE_SECONDS = 45.0


@dataclass(frozen=True)
class Claim:
    """A run folder that rank 0 has for itself, before anything is written into it."""

    folder: RunFolder
    notes: tuple[str, ...] = ()
    """What the user should know about it."""
    loaded: bool = False
    """Whether a checkpoint was loaded, from the folder or from the file that the user named."""
    from_file: bool = False
    """Whether it was the file, so that the folder has no commit yet."""
    copies: Copies | None = None
    """What copies its commits to a remote folder, where it is one."""


@dataclass(frozen=True)
class Doubt:
    """Why the newest commit may be wrong: ranks differ."""

    right_at: int | None
    """The last step after which gradients were found right, where they are what differs."""


class Output:
    """The run folder, the journal and the checkpoint store of a training, on the one rank that writes.

    On other ranks the journal and the store take everything and write nothing.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._folder: RunFolder | None = None
        self._copies: Copies | None = None
        self.journal: Journal = SilentJournal()
        self.store: Store = NoStore()

    @property
    def path(self) -> Path | None:
        """The run folder, or None on a rank that does not write."""
        return self._folder.path if self._folder else None

    def claim(
        self,
        state: TrainState,
        run_dir: Path | None,
        first_cut: Callable[[], Cut],
        *,
        from_disk: bool,
        doubt: Doubt | None = None,
    ) -> Claim:
        """Take the run folder for this rank, which is to be rank 0, and load the newest checkpoint if `from_disk`.

        Where the ranks differ, and `doubt` says since when, it is the newest verified one from before.
        Where there is none, the state is that of the file that the user named, or a fresh one with `first_cut()`.
        `run_dir` is the folder in which the job has been training, if it has. Raises UsageError where the folder
        belongs to another run or process, where the file cannot be loaded, and what `first_cut` raises; no folder is
        touched then.
        """
        if self._folder is not None:
            if not from_disk:
                return Claim(self._folder, copies=self._copies)
            self.close()
        config, notes = self._config, list[str]()
        named = Path(config.run.resume) if config.run.resume not in ("auto", "never") else None
        if run_dir is not None:
            config = config.replace(output_dir=run_dir, resume="auto")
        url = remote_url.url_of(config.run.output_dir or "")

        def start() -> None:
            if not from_disk:
                return
            if named is not None:
                state.load(checkpoint.read_named(named))  # it may be of another model
            else:
                state.cut = first_cut()

        bring = _bringing(config, url, with_checkpoint=from_disk) if url else lambda: None
        if url and run_dir is not None and not from_disk:
            bring = _or_without(bring, url, notes.append)
        folder = _claim(config, start, bring, abandoned=run_dir is not None)
        copying = _copies(config, url, folder, notes.append, must_answer=run_dir is None or from_disk) if url else None
        snapshot = _newest(folder.path, notes.append, doubt) if from_disk and folder.earlier else None
        if snapshot is not None:
            state.load(snapshot)
        elif folder.earlier:
            start()
        from_file = from_disk and snapshot is None and named is not None
        return Claim(
            folder, tuple(notes), loaded=snapshot is not None or from_file, from_file=from_file, copies=copying
        )

    def fetch(self, run_dir: Path | None, *, from_disk: bool) -> Future[HvdTrainError | None]:
        """Begin to fetch what `claim` will need of a run at a URL, and return the future error of that.

        That may take long, and the other ranks must hear from this one meanwhile.
        """
        config = self._config.replace(output_dir=run_dir, resume="auto") if run_dir is not None else self._config
        url, fetched = remote_url.url_of(config.run.output_dir or ""), Future[HvdTrainError | None]()
        if url is None or (self._folder is not None and not from_disk):
            fetched.set_result(None)
            return fetched
        bring = _bringing(config, url, with_checkpoint=from_disk)
        if run_dir is not None and not from_disk:
            bring = _or_without(bring, url, lambda note: None)  # `claim` says so

        def work() -> None:
            try:
                bring()
            except Busy:
                fetched.set_result(None)  # `claim` knows what to do about that
            except HvdTrainError as error:
                fetched.set_result(error)
            except BaseException as error:  # noqa: BLE001  # it is raised where the result is wanted
                fetched.set_exception(error)
            else:
                fetched.set_result(None)

        threading.Thread(target=work, name="fetch", daemon=True).start()
        return fetched

    def claim_unheld(self, run_dir: Path) -> Claim:
        """Take the run folder of a job that has lost rank 0, for this rank to commit its state.

        Raises Busy where a process has it, and UsageError where it cannot be used.
        """
        config, notes = self._config.replace(output_dir=run_dir, resume="auto"), list[str]()
        url = remote_url.url_of(run_dir)
        if url:
            _or_without(_bringing(config, url, with_checkpoint=False), url, notes.append)()
        folder = run_folder.claim(config, datetime.now(), owner=launcher.owner(os.environ))
        copying = _copies(config, url, folder, notes.append, must_answer=False) if url else None
        return Claim(folder, tuple(notes), copies=copying)

    def open(self, claim: Claim | None, state: TrainState, place: Place) -> None:
        """Write into the claimed folder from here on; without a claim, write nothing from here on."""
        if claim is None:
            self.close()
            return
        progress = state.progress
        if self._folder is None:
            self._folder = claim.folder
            path, run = claim.folder.path, self._config.run
            bar = shows_bar(self._config, place)
            held = claim.folder.held
            # It removes what a killed process has half written, before the journal begins to write.
            self.store = DiskStore(
                path,
                run.keep_checkpoints,
                self._config.as_dict(),
                lambda message: self.journal.event("checkpoint", message),
                held,
                run.weights_format,
                claim.copies.ask if claim.copies else lambda: None,
            )
            journal = RunJournal(
                path,
                progress.step,
                progress.epoch,
                live=bar,
                timestamps=run.timestamps,
                ledger=run.ledger,
                permission=held,
                log_to=run.log_to,
                settings=self._config.as_dict(),
            )
            for note in (*claim.folder.notes, *claim.notes):
                journal.event("note", note)
            self.journal, self._copies = journal, claim.copies
            if claim.copies is not None:
                claim.copies.start(lambda message: journal.event("copy", message))
        if claim.from_file:
            self.store.commit(state)  # should all die now, the job does not need the file again
        if state.best and (state.best.epoch, 0) == (progress.epoch, progress.cursor):
            self.store.save_weights(checkpoint.BEST, state)  # whoever was writing these may be gone

    def commit_last(self, state: TrainState) -> bool:
        """Commit before this process ends, and return whether it is on disk.

        A process without which the job has gone on has lost its folder, and commits nothing.
        """
        return self._folder is not None and self._folder.held() and self.store.commit_last(state).result()

    def write_surroundings(self, hosts: Sequence[str], gpu: str | None) -> None:
        """Write what the run runs on: the host of each rank, and the name of this rank's GPU."""
        if self._folder is None or not self._folder.held():
            return
        try:
            machine.write(self._folder.path, hosts, gpu)
        except OSError as error:
            self.journal.event("note", f"cannot write {run_folder.ENVIRONMENT}: {error.strerror}")

    def write_summary(self, values: dict[str, Any]) -> bool:
        """Write how the run ended, and return whether that is on disk; true on a rank that does not write."""
        if self._folder is None:
            return True
        path = self._folder.path / run_folder.SUMMARY
        try:
            durable.write_text(path, json.dumps(values, indent=2) + "\n", self._folder.held)
        except OSError as error:
            self.journal.event("summary", f"cannot write {path}: {error.strerror}")
            return False
        return True

    def copied(self) -> Future[bool]:
        """Have all that is in the run folder copied to its URL, and return whether it is there; true without a URL."""
        done: Future[bool] = Future()
        if self._copies is None:
            done.set_result(True)
        else:
            wait = self._copies.wait
            threading.Thread(target=lambda: done.set_result(wait()), name="copied", daemon=True).start()
        return done

    def name_ranks(self, seats: Sequence[Seat]) -> None:
        """Write down, on the rank that writes, where the processes of all ranks are found, for `hvd-train why`."""
        if self._folder is not None:
            ranks_file.write(self._folder.path, seats, self._folder.held)

    def close(self) -> None:
        """Finish what is being written and give up the folder."""
        self.store.close()
        self.journal.close()
        if self._copies is not None:
            self._copies.close(say)
        if self._folder is not None:
            self._folder.release()
        self._folder, self._copies, self.journal, self.store = None, None, SilentJournal(), NoStore()


def _newest(folder: Path, report: Callable[[str], None], doubt: Doubt | None) -> Snapshot | None:
    """Return the newest checkpoint that may be gone on from; None where there is none."""
    if doubt is None:
        return checkpoint.newest_good(folder, report)
    return checkpoint.newest_verified(folder, report, not_after=doubt.right_at)


def _claim(config: Config, start: Callable[[], None], bring: Callable[[], None], *, abandoned: bool) -> RunFolder:
    """Return the run's folder, as soon as no other process has it; `start` is called before a new one is made.

    `bring` is called before, to bring it up to date.

    `abandoned`: the process that has it is of this job, which has formed a world without it. Such a process is about
    to end, or is stopped or cut off, and must not write any more. Workers of a driver that has died must: they end
    with a commit, which is waited for.
    """
    owner = launcher.owner(os.environ)
    patience = 0.0 if abandoned or not launcher.elastic(os.environ) else _PATIENCE_SECONDS
    deadline = time.monotonic() + patience
    told = False
    while True:
        wait = time.monotonic() < deadline
        try:
            bring()
            return run_folder.claim(config, datetime.now(), start, owner=owner, wait=wait)
        except Busy as busy:
            if wait:
                if not told:
                    say(f"another process is training in {busy.path}: waiting {patience:.0f} s at most for its end")
                    told = True
                time.sleep(0.05)
            elif abandoned or run_folder.belongs_to(busy.path, owner):
                run_folder.take_over(busy.path, owner)
            else:
                raise


def _bringing(config: Config, url: str, *, with_checkpoint: bool) -> Callable[[], None]:
    """Return what brings the working folder of a remote run up to its newest commit. It raises UsageError, and Busy."""
    assert config.run.output_dir is not None
    folder, owner = remote_url.working_folder(config.run.output_dir), launcher.owner(os.environ)
    goes_on = config.run.resume == "auto"

    def step_in(path: Path) -> int:
        for file in checkpoint.committed(path):
            with suppress(checkpoint.BadCheckpoint):
                checkpoint.check(file)
                return checkpoint.step_of(file)
        return -1

    def bring() -> None:
        try:
            place = Remote(url)
            remote.within(remote.ANSWER_S, place.names)
            copies.bring(place, folder, owner, say, goes_on=goes_on, step_in=step_in, with_checkpoint=with_checkpoint)
        except HvdTrainError:
            raise
        except Exception as error:  # noqa: BLE001  # each library has its own
            raise remote.refused(url, error) from None

    return bring


def _or_without(bring: Callable[[], None], url: str, report: Callable[[str], None]) -> Callable[[], None]:
    """Return the same for a job that has all it needs in memory, and must not end because of a service."""

    def try_to_bring() -> None:
        try:
            bring()
        except Busy:
            raise
        except UsageError as error:
            report(f"{error}; training goes on without the files of earlier steps that are in {url}")

    return try_to_bring


def _copies(config: Config, url: str, folder: RunFolder, report: Callable[[str], None], *, must_answer: bool) -> Copies:
    """Return what is to copy the commits of a folder, which is claimed by then. Raises UsageError.

    Unless it `must_answer`, a service that is out of reach now is claimed later.
    """
    made = Copies(Remote(url), folder.path, config.run.keep_checkpoints, launcher.owner(os.environ), folder.held)
    try:
        if note := remote.within(remote.ANSWER_S, made.claim):
            report(note)
    except Exception as error:  # noqa: BLE001  # each library has its own
        if must_answer:
            folder.release()
            if not folder.earlier:
                shutil.rmtree(folder.path, ignore_errors=True)
            raise remote.refused(url, error) from None
    report(f"training works in {folder.path}, and each commit is copied to {url}")
    return made


def shows_bar(config: Config, place: Place) -> bool:
    """Return whether progress is shown as a live bar.

    Launchers forward what ranks print line by line, and Open MPI gives ranks a terminal even where its own output
    goes to a file: there a bar must be asked for.
    """
    if config.run.progress == "auto":
        return place.size == 1 and sys.stdout.isatty() and not launcher.by_open_mpi(os.environ)
    return config.run.progress == "bar"
