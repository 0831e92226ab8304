"""One process's part in a training, through all the worlds that it is part of: meet, train, finish."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path

from hvd_train import checkpoint, loop, transfer
from hvd_train import state as states
from hvd_train.config import Config
from hvd_train.data import identity
from hvd_train.data.sources import OwnData
from hvd_train.elastic.members import can_train_on, in_common, most_advanced, survivors_differ
from hvd_train.errors import FaultRepeats, HvdTrainError, RankLost, ReplicasDiffer, StateLost, UsageError
from hvd_train.handover import nothing_to_hand_over
from hvd_train.job import Arrival, Clocks, Job
from hvd_train.last_commit import commit_for_all
from hvd_train.launch import last_word
from hvd_train.launch.last_word import During
from hvd_train.membership import Membership
from hvd_train.network import weights
from hvd_train.network.device import gpu_name, split_on
from hvd_train.network.models import Builder
from hvd_train.output import Claim, Output
from hvd_train.parts import build_step, fresh_state, warm_parts
from hvd_train.profiling.profile import Profile
from hvd_train.progress.order import Cut, Share, choose_cut, resized_cut
from hvd_train.progress.stop import StopSignal
from hvd_train.result import Result, describe, ending, result_of, summary
from hvd_train.state import TrainState
from hvd_train.validate import Scores
from hvd_train.world.world import DriverLost, World, WorldChanged, result_of_rank_0, together


class Training:
    """Built once. In each world `_meet` brings all ranks to one state, and `_train` goes on from there."""

    def __init__(
        self, config: Config, world: World, stop: StopSignal, own_model: Builder | None, own_data: OwnData | None
    ) -> None:
        self._config, self._world, self._stop = config, world, stop
        self._clocks = Clocks.of(config)
        self._parts, self._optimizer = world.prepare(lambda: warm_parts(config, world, own_model, own_data))
        world.compare(identity.facts(self._parts.data))
        self._output, self._membership = Output(config), Membership()
        self._state: TrainState | None = None
        self._arrival: Arrival | None = None
        self._handover = nothing_to_hand_over(world)
        self._share = Share(None, 0)
        self._during: During = "building"

    def run(self) -> Result:
        """Train to the end. Raises RankLost where the world cannot go on; finished steps are committed then.

        The driver of an elastic job hears of an error before anything is closed.
        """
        try:
            return self._world.run(self._train, self._meet)
        except RankLost as error:
            raise self._committed(error) from error
        except SystemExit:  # the job goes on without this process, or not at all
            if self._state is not None and self._membership.has_state:
                self._output.commit_last(self._state)
            if self._stop.received is not None:
                raise SystemExit(128 + self._stop.received) from None
            raise
        except Exception as error:
            has_trained = self._membership.has_trained
            if isinstance(error, (UsageError, FaultRepeats)) and self._state is not None and self._membership.has_state:
                self._output.commit_last(self._state)
            if isinstance(error, HvdTrainError) and has_trained and not error.of_all_ranks:
                error.raised_by = self._world.place.rank
            last_word.tell(os.environ, error, self._during, self._state.progress.step if self._state else 0)
            raise

    def close(self) -> None:
        """Finish what is being written, and end the loader processes."""
        self._output.close()
        self._membership.close()
        for loader in (self._parts.train_loader, self._parts.val_loader, self._parts.test_loader):
            if loader is not None:
                loader.close()

    def _meet(self) -> None:
        """Come to one state with all ranks: that of the rank that has done most steps. Digests prove that it is one.

        Where no rank has a state that can be trusted, it is that of the newest checkpoint, or a fresh one. Raises
        ReplicasDiffer where the survivors differ and there is no checkpoint, UsageError where rank 0 cannot have the
        run folder or the batch does not fit the data, and RankLost where another rank is gone.
        """
        config, world, self._during = self._config, self._world, "meeting"
        # Made once, whatever befalls the first meeting: an optimizer that is wrapped twice sums twice.
        state = self._state = self._state or fresh_state(config, world, self._parts, self._optimizer)

        # Who is here, and how far? Survivors of one step with different weights cannot be trusted.
        reports = world.gather(self._membership.report(state, self._handover))
        if differ := survivors_differ(reports):
            self._membership.distrust_state()
        from_disk = differ or not any(report.survives for report in reports)
        known_dir = next((report.run_dir for report in reports if report.run_dir), None)

        # Rank 0 takes the run folder and, if need be, the state from the newest checkpoint in it.
        claim: Claim | None = together(world, lambda: self._claim(known_dir, from_disk=from_disk))
        run_dir, loaded = world.broadcast((claim.folder.path, claim.loaded) if claim else None, 0) or (None, False)
        root = 0 if loaded else most_advanced(reports)
        if differ and not loaded:
            raise ReplicasDiffer("the survivors of a fault hold different weights, and there is no checkpoint yet")
        if from_disk and not loaded and reports[root].holds != "fresh":
            raise StateLost("the ranks that had trained are gone, and there is no checkpoint yet; start again")
        if from_disk and not loaded:
            state.cut = self._first_cut()  # rank 0 has it; the rank that gives its fresh state may be another one

        # All ranks take the state of one of them; nothing is sent where all hold the same already. Newcomers are given
        # most of it while the others train. A survivor that is behind keeps its own until it has all of the other: it
        # may be needed if the root is lost meanwhile.
        whole = list(range(world.place.size))  # the ranks that have all of the state
        self._handover = nothing_to_hand_over(world)
        if from_disk or len({report.digest for report in reports}) > 1:
            agrees = not from_disk and reports[world.place.rank].digest == reports[root].digest
            if world.place.rank != root and not self._membership.has_state:
                self._membership.lose_state(run_dir)
            try:
                if not from_disk and can_train_on(reports, root):
                    begin = in_common(reports, root)
                    self._handover = transfer.hand_over(state, world, root, has_it=agrees, begin=begin)
                else:
                    transfer.synchronize(state, world, root, keep=self._membership.has_state and not agrees)
            except ReplicasDiffer as error:
                if not from_disk:
                    self._output.open(claim, state, world.place)
                    raise self._kept(error, whole=state.digest() == reports[root].digest) from error
                raise
            if self._handover.is_under_way:
                whole = [rank for rank in whole if reports[rank].digest == reports[root].digest]
        has_state = world.place.rank in whole
        self._share = Share(whole.index(world.place.rank) if has_state else None, len(whole))
        if config.batch.on_resize == "per-worker":
            state.cut = resized_cut(config.batch, self._share.ranks, self._parts.train_loader.num_samples)
        self._arrival = self._membership.join(reports, run_dir, state.progress.step, has_state=has_state)
        self._output.open(claim, state, world.place)
        self._during = "training"

    def _first_cut(self) -> Cut:
        return choose_cut(self._config.batch, self._world.place.size, self._parts.train_loader.num_samples)

    def _claim(self, run_dir: Path | None, *, from_disk: bool) -> Claim | None:
        if self._world.place.rank != 0:
            return None
        assert self._state is not None
        if from_disk:
            self._state.data = identity.of(self._parts.data, sizes=True)
        return self._output.claim(self._state, run_dir, self._first_cut, from_disk=from_disk)

    def _train(self) -> Result:
        """Train in this world to the end, or until it breaks or is left."""
        assert self._state is not None
        job = self._job(self._state)
        if job.arrival is None:
            self._announce(job)
        try:
            with job.profile.within(job.state.progress.step):
                finished = loop.train(job)
            return self._finish(job, finished=finished)
        except WorldChanged:
            self._membership.leave("newcomers have the state" if job.handover.is_done else "hosts came or went")
            raise
        except RankLost as error:
            self._membership.leave("a rank was lost")
            self._membership.count_fault(error, job.state.progress.step)
            raise

    def _job(self, state: TrainState) -> Job:
        config, world, parts, output = self._config, self._world, self._parts, self._output
        clocks = replace(self._clocks, split=split_on(parts.device))
        return Job(
            config=config,
            world=world,
            parts=parts,
            state=state,
            step=build_step(config, world, parts, clocks.split, self._handover),
            output=output,
            clocks=clocks,
            stop=self._stop,
            profile=Profile(
                config.run.profiled_steps,
                world,
                parts.device,
                output.journal,
                output.path,
                clocks.stopwatch,
                clocks.split,
            ),
            handover=self._handover,
            share=self._share,
            arrival=self._arrival,
        )

    def _announce(self, job: Job) -> None:
        """Tell the user what is about to be trained, and on what."""
        job.output.journal.event(
            "start",
            describe(job),
            world_size=job.world.place.size,
            num_samples=job.parts.train_loader.num_samples,
            repeated_augmentation=job.config.data.repeated_augmentation,
            seed=job.config.seed,
        )
        job.output.write_surroundings(self._membership.hosts, gpu_name(job.parts.device), job.state.data)
        if job.state.progress.step == 0:
            for note in job.parts.notes:
                job.output.journal.event("note", note)

    def _finish(self, job: Job, *, finished: bool) -> Result:
        """Write what is to last, and say how the training ended; nobody leaves before all of it is on disk.

        Should a rank be lost meanwhile, nothing is closed yet: in an elastic job the ranks of the next world come here
        again, and rank 0 there writes.
        """
        if finished:
            try:
                states.confirm_equal(job.state, job.world, has_state=self._membership.has_state)
            except ReplicasDiffer as error:
                job.output.store.save_weights(checkpoint.FINAL, job.state)
                raise self._kept(error) from error
        signals = [number for number in job.world.gather(self._stop.received) if number is not None]
        saved = result_of_rank_0(job.world, job.output.store.commit_last(job.state, final_weights=finished))
        test = self._test(job) if finished else None
        stopped_by = signals[0] if signals and not finished else None
        result = result_of(job, finished=finished, stopped_by=stopped_by, saved=saved, test=test)
        if finished and not job.world.broadcast(job.output.write_summary(summary(result, job.config)), 0):
            result = replace(result, saved=False)
        job.output.journal.event("end", ending(result, job.config))
        return result

    def _kept(self, error: ReplicasDiffer, *, whole: bool = True) -> ReplicasDiffer:
        """Commit what rank 0 holds, if that is `whole`, and return the error that says so.

        All ranks wait for it: where one of them ends, launchers end the others. Raises RankLost.
        """
        assert self._state is not None
        kept = self._world.broadcast(whole and self._output.commit_last(self._state), 0)
        return ReplicasDiffer(f"{error}; what rank 0 holds is {'committed' if kept else 'NOT committed'}")

    def _test(self, job: Job) -> Scores | None:
        """Score the best weights on the test set, if there is one.

        Rank 0 has the best weights on disk; where it could not write them, the last ones are scored.
        """
        if job.parts.test_loader is None:
            return None
        run_dir = job.output.path
        best = job.world.broadcast(checkpoint.read_weights(run_dir / checkpoint.BEST) if run_dir else None, 0)
        model = copy.deepcopy(job.state.result)
        if best is not None:
            weights.load(best, model)
        return loop.validate(job, job.parts.test_loader, model)

    def _committed(self, error: RankLost) -> RankLost:
        """Commit, and return the error that says so: the weights here are whole, so no finished step is lost."""
        if self._state is None or not self._membership.has_state:
            return error
        run_dir = self._membership.run_dir
        if isinstance(error, DriverLost) and self._output.path is None and run_dir is not None:
            kept = commit_for_all(self._output, self._config, self._state, run_dir)
        elif self._output.path is None:
            kept = "done, and for rank 0 to commit; the same command goes on from the last commit"
        elif self._output.commit_last(self._state):
            kept = "committed; the same command goes on from there"
        else:
            kept = "NOT committed (see above); the same command goes on from the last commit"
        step = self._state.progress.step
        return RankLost(f"another rank ended or cannot be reached ({error}); step {step} is {kept}")
