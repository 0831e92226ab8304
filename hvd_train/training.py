"""One process's part in a training, through all the worlds that it is part of."""

from __future__ import annotations

import copy
import json
import os
import socket
import sys
import time
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from hvd_train import checkpoint, state
from hvd_train.checkpoint import DiskStore, NoStore
from hvd_train.config import Config
from hvd_train.data.sources import OwnData
from hvd_train.elastic.members import Change, Member, Standing, change_between, most_advanced, torn
from hvd_train.errors import Diverged, FaultRepeats, HvdTrainError, RankLost, ReplicasDiffer
from hvd_train.launch import launcher
from hvd_train.loop import Job, validate
from hvd_train.loop import train as train_loop
from hvd_train.network.device import gpu_name, split_on
from hvd_train.network.models import Builder
from hvd_train.parts import fresh_state, mixer, warm_parts
from hvd_train.profiling.profile import Profile
from hvd_train.progress import order
from hvd_train.progress.clock import Stopwatch, Timer
from hvd_train.progress.order import Cut
from hvd_train.progress.stop import StopSignal
from hvd_train.result import Result, describe, ending, result_of, summary
from hvd_train.run_files import durable, machine, run_folder
from hvd_train.run_files.journal import RunJournal, SilentJournal
from hvd_train.run_files.run_folder import Busy, RunFolder
from hvd_train.state import TrainState
from hvd_train.step import Step
from hvd_train.validate import Scores
from hvd_train.world.world import Place, World, WorldChanged, together

_SAME_STEP_FAULTS = 5  # a fault that comes back as often at one step is in the step, not in the cluster
_PATIENCE_SECONDS = 45.0  # workers without a driver may take as long to notice, to commit and to leave the run folder


@dataclass(frozen=True)
class Desk:
    """What writes, on the one rank that has the run folder."""

    folder: RunFolder
    journal: RunJournal
    store: DiskStore

    def commit_last(self, state: TrainState) -> bool:
        """Commit, unless the job has gone on without this process and has the folder; whether it is on disk."""
        return self.folder.held() and self.store.commit(state, wait=True)

    def leave(self) -> None:
        """Finish what is being written and give up the folder."""
        self.store.close()
        self.journal.close()
        self.folder.release()


class Training:
    """Built once; in each world `_enter` brings it to the state of all, and `_live` trains on from there."""

    def __init__(
        self, config: Config, world: World, stop: StopSignal, own_model: Builder | None, own_data: OwnData | None
    ) -> None:
        self._config, self._world, self._stop = config, world, stop
        self._started = time.perf_counter()
        self._stopwatch, self._commit_timer = Stopwatch(), Timer(config.run.commit_seconds)
        self._time_limit = Timer(config.run.max_seconds, passed=launcher.running_for(os.environ, time.time()))
        self._parts, self._optimizer = world.prepare(lambda: warm_parts(config, world, own_model, own_data))
        self._mix = mixer(config.data, len(self._parts.data.classes))
        self._state: TrainState | None = None
        self._desk: Desk | None = None
        self._standing = Standing(Member(socket.gethostname(), os.getpid()))
        self._change: Change | None = None
        self._reported = self._left = 0.0
        self._faults: tuple[int, int] = (-1, 0)  # at this step, so many in a row

    def run(self) -> Result:
        """Train to the end. Raises RankLost where the world cannot go on; finished steps are committed then."""
        try:
            return self._world.run(self._live, self._enter)
        except RankLost as error:
            raise self._committed(error) from error
        except SystemExit:  # the job goes on without this process, or not at all
            if self._state is not None and self._desk is not None:
                self._desk.commit_last(self._state)
            raise
        except HvdTrainError as error:
            if self._standing.lived and not isinstance(error, Diverged):
                error.met_by = self._world.place.rank
            raise

    def close(self) -> None:
        """Give up what is open."""
        if self._desk is not None:
            self._desk.leave()
        for loader in (self._parts.train_loader, self._parts.val_loader, self._parts.test_loader):
            if loader is not None:
                loader.close()

    def _enter(self) -> None:
        """All ranks meet, and take the state of the one that has done most steps; digests prove that they have it."""
        world = self._world
        # Made once, whatever befalls the first meeting: an optimizer that is wrapped twice sums twice.
        training = self._state = self._state or fresh_state(self._config, world, self._parts, self._optimizer)
        if not self._standing.lived:
            training.cut = self._cut()
        standings = world.gather(self._own_standing(training))
        lived = [standing for standing in standings if standing.lived]
        from_disk = torn(standings) or not lived
        known = next((standing.run_dir for standing in lived if standing.run_dir), None)
        folder, notes, loaded = together(world, lambda: self._open_folder(training, known, from_disk=from_disk))
        run_dir, loaded = world.broadcast((folder.path if folder else None, loaded), 0)
        if lived and from_disk and not loaded:
            raise ReplicasDiffer("the survivors of a fault hold different weights, and there is no checkpoint yet")
        if from_disk or len({standing.digest for standing in standings}) > 1:
            state.synchronize(training, world, 0 if from_disk else most_advanced(standings))
        if self._config.batch.on_resize == "per-worker":
            training.cut = self._cut()
        self._change = change_between(standings, training.progress.step)
        members = tuple(standing.member for standing in standings)
        self._standing = replace(self._standing, lived=True, before=members, run_dir=run_dir)
        self._sit_down(training, folder, notes)

    def _cut(self) -> Cut:
        return order.choose_cut(self._config.batch, self._world.place.size, self._parts.train_loader.num_samples)

    def _own_standing(self, training: TrainState) -> Standing:
        if not self._standing.lived:
            return self._standing
        # What comes from here on is counted by each rank itself: computing the digest, waiting for newcomers.
        self._reported = time.perf_counter()
        progress, waited = training.progress, self._reported - self._left
        return replace(
            self._standing, epoch=progress.epoch, step=progress.step, digest=training.digest(), waited=waited
        )

    def _live(self) -> Result:
        """Train in this world to the end, or until it breaks or is left."""
        assert self._state is not None
        job = self._job(self._state)
        if self._change is None:
            facts = {
                "world_size": self._world.place.size,
                "num_samples": job.train_loader.num_samples,
                "repeated_augmentation": self._config.data.repeated_augmentation,
            }
            job.journal.event("start", describe(job), **facts)
            if self._desk is not None:
                self._note_machine(self._desk)
            if self._state.progress.step == 0:
                for note in self._parts.notes:
                    job.journal.event("note", note)
        try:
            with job.profile.within(self._state.progress.step):
                finished = train_loop(job)
            return self._finish(job, finished=finished)
        except WorldChanged:
            self._leave("hosts came or went")
            raise
        except RankLost as error:
            self._leave("a rank was lost")
            self._count_fault(error, self._state.progress.step)
            raise

    def _note_machine(self, desk: Desk) -> None:
        hosts = [member.host for member in self._standing.before]
        try:
            machine.write(desk.folder.path, hosts, gpu_name(self._parts.device))
        except OSError as error:
            desk.journal.event("note", f"cannot write {run_folder.ENVIRONMENT}: {error.strerror}")

    def _leave(self, why: str) -> None:
        self._left, self._standing = time.perf_counter(), replace(self._standing, why=why)

    def _count_fault(self, error: RankLost, step: int) -> None:
        """Raise FaultRepeats where the same step breaks again and again: no other world will do better."""
        count = self._faults[1] + 1 if self._faults[0] == step else 1
        self._faults = (step, count)
        if count == _SAME_STEP_FAULTS:
            raise FaultRepeats(f"step {step + 1} has failed {count} times in a row; the last time: {error}") from error

    def _job(self, training: TrainState) -> Job:
        desk, split = self._desk, split_on(self._parts.device)
        journal = desk.journal if desk else SilentJournal()
        folder = desk.folder.path if desk else None
        return Job(
            config=self._config,
            world=self._world,
            device=self._parts.device,
            state=training,
            step=Step(
                self._config,
                self._world,
                self._parts.model,
                self._parts.device,
                self._mix,
                together=self._parts.example if self._config.model.sync_batch_norm else None,
                split=split,
            ),
            train_loader=self._parts.train_loader,
            val_loader=self._parts.val_loader,
            classes=self._parts.data.classes,
            journal=journal,
            store=desk.store if desk else NoStore(),
            stop=self._stop,
            stopwatch=self._stopwatch,
            split=split,
            profile=Profile(
                self._config.run.profiled_steps,
                self._world,
                self._parts.device,
                journal,
                folder,
                self._stopwatch,
                split,
            ),
            commit_timer=self._commit_timer,
            time_limit=self._time_limit,
            change=self._change,
            since=self._reported,
        )

    def _finish(self, job: Job, *, finished: bool) -> Result:
        # What ranks do together comes first: should one be lost in it, nothing is closed yet.
        if finished:
            state.confirm_equal(job.state, self._world)
        signals = [number for number in self._world.gather(self._stop.received) if number is not None]
        test = self._test(job) if finished and self._parts.test_loader is not None else None
        if finished:
            job.store.save_weights(checkpoint.FINAL, job.state)
            job.store.commit(job.state, wait=True)
        saved = job.store.close()
        result = result_of(
            job,
            self._desk.folder.path if self._desk else None,
            finished=finished,
            stopped_by=signals[0] if signals and not finished else None,
            saved=saved,
            test=test,
            seconds=time.perf_counter() - self._started,
        )
        if self._desk is not None and finished:
            _write_summary(self._desk, result, self._config)
        job.journal.event("end", ending(result))
        return result

    def _test(self, job: Job) -> Scores:
        """Scores of the best weights, which rank 0 has on disk (where it could not write them: the last ones)."""
        assert self._parts.test_loader is not None
        best = None if self._desk is None else checkpoint.read_weights(self._desk.folder.path / checkpoint.BEST)
        best = self._world.broadcast(best, 0)
        model = copy.deepcopy(job.state.result)
        if best is not None:
            model.load_state_dict(best)
        return validate(job, self._parts.test_loader, model)

    def _committed(self, error: RankLost) -> RankLost:
        """A rank that is lost costs no finished step: the weights here are whole, and are committed."""
        if self._state is None or not self._standing.lived:
            return error
        if self._desk is None:
            kept = "done, and for rank 0 to commit; the same command goes on from the last commit"
        elif self._desk.commit_last(self._state):
            kept = "committed; the same command goes on from there"
        else:
            kept = "NOT committed (see above); the same command goes on from the last commit"
        step = self._state.progress.step
        lost = RankLost(f"another rank ended or cannot be reached ({error}); step {step} is {kept}")
        lost.ending = self._stop.received is not None
        return lost

    # -------------------------------------------------------------------------------- the run folder, on rank 0

    def _open_folder(
        self, training: TrainState, run_dir: Path | None, *, from_disk: bool
    ) -> tuple[RunFolder | None, list[str], bool]:
        """On rank 0: the run folder, what the user should know of it, and whether a state was loaded from it."""
        notes: list[str] = []
        if self._world.place.rank != 0:
            return None, notes, False
        if self._desk is not None:
            if not from_disk:
                return self._desk.folder, notes, False
            self._desk.leave()
            self._desk = None
        config = self._config
        if run_dir is not None:
            config = config.replace(output_dir=run_dir, resume="auto")
        elif launcher.goes_on(os.environ):
            config = config.replace(resume="auto")
        named = config.run.resume not in ("auto", "never")
        snapshot = checkpoint.read_named(Path(config.run.resume)) if named else None
        if snapshot is not None:
            training.load(snapshot)  # before a folder is touched: the checkpoint may be of another model
        folder = self._claim(config, given_up=run_dir is not None)
        if from_disk and snapshot is None and folder.earlier:
            snapshot = checkpoint.newest_good(folder.path, notes.append)
            if snapshot is not None:
                training.load(snapshot)
        return folder, notes, snapshot is not None

    def _claim(self, config: Config, *, given_up: bool) -> RunFolder:
        """The run's folder. `given_up`: whoever has it is of this job, which has formed a world without it.

        Such a process is about to end, or it is stopped or cut off, and is not to write any more. Workers of a
        driver that has died are to: they end with a commit.
        """
        patience = 0.0 if given_up or not launcher.elastic(os.environ) else _PATIENCE_SECONDS
        deadline = time.monotonic() + patience
        while True:
            try:
                return run_folder.claim(config, datetime.now())
            except Busy:
                if time.monotonic() < deadline:
                    time.sleep(0.05)
                elif config.run.output_dir is not None and (given_up or launcher.goes_on(os.environ)):
                    run_folder.take_over(config.run.output_dir)
                else:
                    raise

    def _sit_down(self, training: TrainState, folder: RunFolder | None, notes: list[str]) -> None:
        """On rank 0: open what writes; elsewhere: close it, where it is open."""
        if folder is None:
            if self._desk is not None:
                self._desk.leave()
                self._desk = None
            return
        config, progress = self._config, training.progress
        if self._desk is None:
            live, ledger = shows_bar(config, self._world.place), config.run.ledger
            journal = RunJournal(folder.path, progress.step, progress.epoch, live=live, ledger=ledger)
            for note in (*folder.notes, *notes):
                journal.event("note", note)
            keep, values = config.run.keep_checkpoints, config.as_dict()
            store = DiskStore(folder.path, keep, values, lambda message: journal.event("checkpoint", message))
            self._desk = Desk(folder, journal, store)
        if training.best and (training.best.epoch, 0) == (progress.epoch, progress.cursor):
            self._desk.store.save_weights(checkpoint.BEST, training)  # whoever was writing these may be gone


def shows_bar(config: Config, place: Place) -> bool:
    """Whether progress is a live bar.

    Launchers forward what ranks print line by line, and Open MPI gives ranks a terminal even where its own output
    goes to a file: there a bar must be asked for.
    """
    if config.run.progress == "auto":
        return place.size == 1 and sys.stdout.isatty() and not launcher.by_open_mpi(os.environ)
    return config.run.progress == "bar"


def _write_summary(desk: Desk, result: Result, config: Config) -> None:
    path = desk.folder.path / run_folder.SUMMARY
    try:
        durable.write_text(path, json.dumps(summary(result, config), indent=2) + "\n")
    except OSError as error:
        desk.journal.event("summary", f"cannot write {path}: {error.strerror}")
