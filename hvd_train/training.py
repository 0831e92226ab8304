"""One process's part in a training, through all the worlds that it is part of: meet, train, finish."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from torch.optim import Optimizer

from hvd_train import checkpoint, goals, loop, remote_url, transfer, weights_file
from hvd_train.config import Config
from hvd_train.elastic.members import can_train_on, in_common, most_advanced, survivors_differ
from hvd_train.errors import (
    Diverged,
    FaultRepeats,
    GpuFailed,
    HvdTrainError,
    RankLost,
    ReplicasDiffer,
    StateLost,
    UsageError,
)
from hvd_train.handover import nothing_to_hand_over
from hvd_train.job import Arrival, Clocks, Job
from hvd_train.last_commit import commit_for_all
from hvd_train.launch import last_word, launcher, stacks, stand_still
from hvd_train.launch.last_word import During
from hvd_train.membership import Membership
from hvd_train.network.device import check_own_gpus, gpu_identity, gpu_name, split_on, use_cores
from hvd_train.network.memory import enough_for_passes
from hvd_train.network.usage import peak_memory
from hvd_train.output import Claim, Doubt, Output
from hvd_train.parts import Parts, build_steps, fresh_state, share_weights
from hvd_train.profiling.profile import Profile
from hvd_train.progress.balance import Balance
from hvd_train.progress.order import Cut, Share, choose_cut, resized_cut
from hvd_train.progress.slow_ranks import SlowRanks
from hvd_train.progress.stop import StopSignal
from hvd_train.progress.whereabouts import here
from hvd_train.rank_times import OwnTimes
from hvd_train.result import Result, describe, ending, last_numbers, result_of, summary
from hvd_train.run_files.records import Ending
from hvd_train.state import TrainState, confirm_equal
from hvd_train.step import Step
from hvd_train.suspicions import StatesDiffer, Suspicions
from hvd_train.validate import Scores
from hvd_train.world.world import DriverLost, World, WorldChanged, result_of_rank_0, together


class Left(BaseException):
    """Raised in the place of a step, on all ranks after the same one: their program asks for no more of them."""


class Training:
    """Built once. In each world `_meet` brings all ranks to one state, and `_train` goes on from there."""

    def __init__(
        self, config: Config, world: World, stop: StopSignal, build: Callable[[], tuple[Parts, Optimizer]]
    ) -> None:
        """`build` returns the parts and the optimizer of this rank, without a word to other ranks."""
        stacks.answer_why()
        self._config, self._world, self._stop = config, world, stop
        self._clocks = Clocks.of(config)
        self.parts, self._optimizer = world.prepare(build)
        self._output, self._membership = Output(config), Membership(gpu_identity(self.parts.device))
        self._state: TrainState | None = None
        self._arrival: Arrival | None = None
        self._handover = nothing_to_hand_over(world)
        self._share = Share(None, 0)
        self._computing: list[int] = []
        self._slow_ranks, self._suspicions = SlowRanks(), Suspicions()
        self._right_at: int | None = None  # up to which step gradients were right, where they were wrong later
        self._during: During = "building"
        self._job: Job | None = None
        self.result: Result | None = None
        """How the training ended; None before it has."""
        self._ending = Ending("failed")
        self.was_left = False
        """Whether its program has ended it before its time."""

    @property
    def job(self) -> Job:
        """The training in the world of now; there is one as soon as a step was asked for."""
        assert self._job is not None
        return self._job

    def steps(self) -> Generator[Step, None, None]:
        """Yield the steps that are left. Raises RankLost where the world cannot go on, with all of them committed.

        The driver of an elastic job hears of an error before anything is closed.
        """
        try:
            yield from self._world.in_each_world(self._train, self._meet)
        except RankLost as error:
            raise self._committed(error) from error
        except SystemExit:  # the job goes on without this process, or not at all
            self._ending = Ending("stopped")
            if self._state is not None and self._membership.has_state:
                self._output.commit_last(self._state)
            if self._stop.received is not None:
                raise SystemExit(128 + self._stop.received) from None
            raise
        except Exception as error:
            has_trained = self._membership.has_trained
            if isinstance(error, (UsageError, FaultRepeats)) and self._state is not None and self._membership.has_state:
                self._output.commit_last(self._state)
            if isinstance(error, HvdTrainError) and has_trained and not isinstance(error, Diverged):
                error.raised_by = self._world.place.rank
            last_word.tell(os.environ, error, self._during, self._state.progress.step if self._state else 0)
            raise

    def close(self) -> None:
        """Finish what is being written, and end the loader processes."""
        stand_still.end()
        if self.result is None:
            self._output.journal.end(self._ending)
        self._output.close()
        self._membership.close()
        for loader in (self.parts.train_loader, self.parts.val_loader, self.parts.test_loader):
            if loader is not None:
                loader.close()

    def _meet(self) -> None:
        """Come to one state with all ranks: that of the rank that has done most steps. Digests prove that it is one.

        Where no rank has a state that can be trusted, it is that of the newest checkpoint, or a fresh one. Raises
        ReplicasDiffer where the survivors differ and there is no checkpoint, UsageError where rank 0 cannot have the
        run folder or the batch does not fit the data, and RankLost where another rank is gone.
        """
        config, world, self._during = self._config, self._world, "meeting"
        here.place(world.place.rank, world.place.size)
        here.at("meeting")
        use_cores(self.parts.device, world.place)
        # Made once, whatever befalls the first meeting: an optimizer that is wrapped twice sums twice.
        state = self._state = self._state or fresh_state(config, world, self.parts, self._optimizer)

        # Who is here, and how far? Survivors of one step with different weights cannot be trusted.
        reports = world.gather(self._membership.report(state, self._handover))
        check_own_gpus([report.gpu for report in reports])
        if differ := survivors_differ(reports):
            self._membership.distrust_state()
        from_disk = differ or not any(report.survives for report in reports)
        known_dir = next((report.run_dir for report in reports if report.run_dir), None)

        # Rank 0 takes the run folder and, if need be, the state from the newest checkpoint in it.
        if remote_url.url_of(known_dir or config.run.output_dir or ""):
            fetched = self._output.fetch(known_dir, from_disk=from_disk) if world.place.rank == 0 else Future()
            if error := result_of_rank_0(world, fetched):
                raise error
        claim: Claim | None = together(world, lambda: self._claim(known_dir, from_disk=from_disk, doubted=differ))
        run_dir, loaded = world.broadcast((self._known_as(claim), claim.loaded) if claim else None, 0) or (None, False)
        root = 0 if loaded else most_advanced(reports)
        if differ and not loaded:
            raise ReplicasDiffer(
                f"the ranks hold different weights ({reports[0].reason}), and there is no checkpoint yet to go back "
                "to; type the same command to start anew"
            )
        if from_disk and not loaded and reports[root].holds != "fresh":
            raise StateLost("the ranks that had trained are gone, and there is no checkpoint yet; start again")
        if from_disk and not loaded:
            # Rank 0 has it; the rank that gives its fresh state may be another one. Each host has room for its images.
            state.cut = together(world, self._first_cut)

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
                if not from_disk and self.parts.updated_alone and can_train_on(reports, root):
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
        if loaded:
            goals.check_measured(state, self.parts.meter)
        has_state = world.place.rank in whole
        if has_state:
            state.verified_step = state.progress.step
        self._share, self._computing = Share(whole.index(world.place.rank) if has_state else None, len(whole)), whole
        if config.batch.on_resize == "per-worker":
            state.cut = resized_cut(config.batch, self._share.ranks, self.parts.train_loader.num_samples)
        if not self._membership.has_trained:
            self._clocks.lap.take()  # what has passed until now was no training
        self._arrival = self._membership.join(reports, run_dir, state.progress.step, has_state=has_state)
        self._output.open(claim, state, world.place)
        self._output.name_ranks([report.seat for report in reports if report.seat is not None])
        if world.place.size > 1:
            stand_still.watch(
                world.place.rank, None if run_dir is None else remote_url.working_folder(run_dir), os.environ
            )
        self._during = "training"

    def _first_cut(self) -> Cut:
        """Return the cut of a training that begins. Raises UsageError where none can."""
        if self.parts.data.refusal is not None:
            raise UsageError(self.parts.data.refusal)
        return choose_cut(self._config.batch, self._world.place.size, self.parts.train_loader.num_samples)

    def _claim(self, run_dir: Path | None, *, from_disk: bool, doubted: bool) -> Claim | None:
        if self._world.place.rank != 0:
            return None
        assert self._state is not None
        doubt = Doubt(self._right_at) if doubted else None
        return self._output.claim(self._state, run_dir, self._first_cut, from_disk=from_disk, doubt=doubt)

    def _known_as(self, claim: Claim) -> Path:
        """Return the run folder as every host knows it: a remote one is worked on in another folder on each."""
        return claim.folder.path if claim.copies is None else Path(claim.copies.url)

    def _train(self) -> Generator[Step, None, None]:
        """Yield the steps in this world to the end, or until it breaks or is left."""
        assert self._state is not None
        job = self._job = self._job_of(self._state)
        if job.arrival is None:
            self._announce(job)
        if not self._handover.is_under_way:
            share_weights(self._config, self._world, self._state)
        try:
            with job.profile.within(job.state.progress.step):
                finished = yield from loop.steps(job)
            self.result = self._finish(job, finished=finished)
        except Left:
            self.was_left = True
            self.result = self._finish(job, finished=False)
        except StatesDiffer as error:
            self._membership.distrust_state()
            self._membership.leave(str(error))
            self._right_at = error.found.right_at
            own_host, may_leave = job.hosts[job.world.place.rank], launcher.elastic(os.environ)
            self._suspicions.raise_if_hopeless(error.found, own_host, job.hosts, may_leave=may_leave)
            raise
        except WorldChanged:
            self._membership.leave("newcomers have the state" if job.handover.is_done else "hosts came or went")
            raise
        except RankLost as error:
            self._membership.leave("a rank was lost")
            self._membership.count_fault(error, job.state.progress.step)
            raise

    def _enough_memory(self) -> AbstractContextManager[None]:
        return enough_for_passes(self._config.batch, self.job.state.cut, self.parts.device)

    def _job_of(self, state: TrainState) -> Job:
        config, world, parts, output = self._config, self._world, self.parts, self._output
        clocks = replace(self._clocks, split=split_on(parts.device))
        self._slow_ranks.meet(self._membership.members)
        return Job(
            config=config,
            world=world,
            parts=parts,
            state=state,
            steps=build_steps(config, world, parts, clocks.split, self._handover, self._enough_memory),
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
            hosts=self._membership.hosts,
            own_times=OwnTimes(clocks.split),
            balance=Balance(self._computing, is_on=config.batch.balance),
            slow_ranks=self._slow_ranks,
            suspicions=self._suspicions,
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
            task=job.config.task.task,
            unit=job.parts.unit,
            best_by=goals.deciding(job.config.schedule, job.parts.meter.task).name,
            figures=[figure.plain() for figure in job.parts.meter.task.all_figures],
        )
        job.output.write_surroundings(self._membership.hosts, gpu_name(job.parts.device))
        if job.state.progress.step == 0:
            for note in job.parts.notes:
                job.output.journal.event("note", note)

    def _finish(self, job: Job, *, finished: bool) -> Result:
        """Write what is to last, and say how the training ended; nobody leaves before all of it is on disk.

        Should a rank be lost meanwhile, nothing is closed yet: in an elastic job the ranks of the next world come here
        again, and rank 0 there writes.
        """
        here.at("end")
        if self.was_left:  # its program would take no step again
            confirm_equal(job.state, job.world, has_state=self._membership.has_state)
            job.state.verified_step = job.state.progress.step
        else:
            loop.verify(job)
        mine = self._stop.received, job.clocks.time_limit.due, peak_memory(job.parts.device)
        of_ranks = job.world.gather(mine)
        signals = [number for number, *_ in of_ranks if number is not None]
        # Of the same limit, though on each by its own clock. Who sends a signal does not wait long for what comes then.
        out_of_time = not (finished or signals or self.was_left) and any(due for _, due, _ in of_ranks)
        planned = finished or out_of_time
        if planned and job.state.best is None and job.parts.val_loader is not None:
            job.output.store.save_weights(checkpoint.BEST, job.state)  # the last weights are the best that there are
        saved = result_of_rank_0(job.world, job.output.store.commit_last(job.state, final_weights=planned))
        last = self._score_last(job) if planned else None
        test = self._test(job) if planned else None
        stopped_by = signals[0] if signals and not finished else None
        peaks = {name: max(peak[name] for *_, peak in of_ranks) for name in mine[-1]}
        result = result_of(
            job, finished=finished, stopped_by=stopped_by, saved=saved, last=last, test=test, peaks=peaks
        )
        if planned and not job.world.broadcast(job.output.write_summary(summary(result, job.config)), 0):
            result = replace(result, saved=False)
        copied = True
        if remote_url.url_of(self._membership.run_dir or ""):
            copied = result_of_rank_0(job.world, job.output.copied())
            result = replace(result, saved=result.saved and copied)
        limit = f"its time limit (--max-time {self._config.run.max_time})"
        stopped = "its program" if self.was_left else limit if out_of_time else "its launcher"
        job.output.journal.event("end", ending(result, job.config, stopped=stopped, copied=copied))
        job.output.journal.end(last_numbers(result))
        return result

    def _kept(self, error: ReplicasDiffer, *, whole: bool) -> ReplicasDiffer:
        """Commit what rank 0 holds, if that is `whole`, and return the error that says so.

        All ranks wait for it: where one of them ends, launchers end the others. Raises RankLost.
        """
        assert self._state is not None
        kept = self._world.broadcast(whole and self._output.commit_last(self._state), 0)
        return ReplicasDiffer(f"{error}; what rank 0 holds is {'committed' if kept else 'NOT committed'}")

    def _score_last(self, job: Job) -> Scores | None:
        """Score the weights of a training that ends in the middle of an epoch, if there is a validation set.

        The evaluation is that of no epoch: it is no record of one, and never the best. How the models of a program's
        own loop are scored, that program alone knows.
        """
        if job.parts.val_loader is None or not job.state.progress.cursor or job.config.is_of_program:
            return None
        return loop.validate(job, job.parts.val_loader, job.state.result)

    def _test(self, job: Job) -> Scores | None:
        """Score the best weights on the test set, if there is one.

        Rank 0 has the best weights on disk; where it could not write them, the last ones are scored.
        """
        if job.parts.test_loader is None:
            return None
        run_dir = job.output.path
        file = weights_file.found_in(run_dir, checkpoint.BEST) if run_dir else None
        best = checkpoint.read_weights(file) if file else None
        model = copy.deepcopy(job.state.result)
        if best is not None:
            model.load_state_dict(best)
        transfer.send(model.state_dict(), job.world, 0)
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
        if isinstance(error, GpuFailed):
            return GpuFailed(f"{error}; step {step} is {kept}")
        return RankLost(f"another rank ended or cannot be reached ({error}); step {step} is {kept}")
