"""A training on this rank: its parts, its worlds one after another, and its end."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from torch import nn

from hvd_train import checkpoint
from hvd_train.config import Config
from hvd_train.console import say
from hvd_train.data import identity
from hvd_train.data.loader import Ahead, Loader
from hvd_train.data.plain import text_of
from hvd_train.elastic.members import RankReport, most_advanced, survivors_differ
from hvd_train.errors import FaultRepeats, HvdTrainError, RankLost, ReplicasDiffer, UsageError, first_few
from hvd_train.launch import exit_report
from hvd_train.launch.exit_report import During
from hvd_train.membership import Membership, synchronize
from hvd_train.network import buffers, weights
from hvd_train.network.buffers import digest_of, digest_of_module, tensors_in
from hvd_train.network.device import check_own_gpus, gpu_load, gpu_name, peak_memory_gib, split_on
from hvd_train.output import Output
from hvd_train.parts import Optimizers, Parts, fresh_state
from hvd_train.profiling import Profile
from hvd_train.progress.clock import Stopwatch, Timer
from hvd_train.progress.order import Batch, Indices, Order, assignments, choose_layout, epoch_size, resized_layout
from hvd_train.progress.stop import StopSignal
from hvd_train.result import Result, describe, ending, summary
from hvd_train.run_files import run_folder
from hvd_train.run_files.run_folder import RunFolder
from hvd_train.state import (
    Answer,
    Label,
    Point,
    Snapshot,
    TrainState,
    confirm_equal,
    different_tensors,
    to_host,
    values_of,
)
from hvd_train.tasks.task import Measuring, Scores, Task, targets_of
from hvd_train.updater import Updater, Votes, of_use
from hvd_train.validate import evaluate
from hvd_train.world.world import World, result_of_rank_0, together

REVERSED = "HVD_TRAIN_REVERSED"  # add up the micro-batches of a rank in the opposite order, for `hvd-train prove`
_GPU_SECONDS = 10.0  # from one look at the load of the GPU to the next


class Overtaken(UsageError):
    """Other ranks are in a later training of the program: this one is over, with this `result`."""

    result: Result


class Training:
    """A training, built once. Its loop calls `join` first, and `meet` after each fault.

    What changes with the world is made for each: `updater`, `profile`, `split`, and the batches.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        stop: StopSignal,
        parts: Parts,
        optimizers: Optimizers,
        name: str = "",
        replays: Path | None = None,
    ) -> None:
        """Compare the data of the ranks. `replays` is the folder of the run, if it has finished and is only read."""
        self.config = config
        self.world = world
        self.parts = parts
        self.stop = stop
        self._optimizers = optimizers
        self._started = time.perf_counter()
        self.stopwatch = Stopwatch()
        self._clock = Timer(None)
        self._before = 0.0
        self.commit_timer = Timer(config.run.commit_seconds)
        self._gpu_timer = Timer(_GPU_SECONDS)
        check_own_gpus(world, parts.device)
        constants = {f"constant module {n}": digest_of_module(m) for n, m in enumerate(parts.task.constants)}
        world.compare({**identity.facts(parts.identity), **constants})
        self.output = Output(config, world.program, name, replays)
        self.membership = Membership()
        self.name = name
        self.waits = Point().label(-1)  # where its program is, for other ranks
        self.last_update: tuple[Answer, Votes] | None = None  # since the last point
        self._state: TrainState | None = None
        self._during: During = "building"
        self.writes = buffers.Writes(nn.Module())  # by the program, outside of updates
        self.is_whole = True  # False: there are such since the last point, or a step is half done
        self._differing_buffers = set[str]()  # of which the user has been told
        self.has_joined = False  # from then on its program continues from its own place
        self._batches: Ahead | None = None
        self._batch: tuple[int, Batch] | None = None  # the current one, and the steps before it
        self._received: Snapshot | None = None  # the state that another rank has sent, until the program is there
        self._state_at = self.waits  # the place of that state
        self.compares = False  # whether ranks compare all that they hold before the next collective

    @property
    def state(self) -> TrainState:
        """The state, once the ranks have met."""
        assert self._state is not None
        return self._state

    def join(self) -> None:
        """Meet the other ranks for the first time. Raises as `meet` does."""
        if not self.has_joined:
            self.world.join(self._synchronize)
            self.has_joined = True
            if self.membership.change is None:
                self._announce()

    def meet(self, lost: RankLost | None = None) -> None:
        """Form another world, after a fault or because hosts came or went; all ranks then have the same state.

        Raises: RankLost: if no other world can form; FaultRepeats: if the same step fails again and again.
        """
        why = "a rank was lost" if lost else "hosts came or went"
        self.profile.drop(why)
        self.membership.leave(why)
        if lost is not None:
            lost.step = self.state.progress.step
            self.membership.count_fault(lost, lost.step)
        self.world.meet(self._synchronize, lost)

    def _synchronize(self) -> None:
        """Give all ranks the state of the survivor that has done the most.

        If no rank survives, they load the last commit; without a commit they start fresh. Raises: ReplicasDiffer: if
        survivors differ, or ranks after loading; UsageError: if rank 0 cannot claim the run folder, or the batch does
        not fit the data; RankLost: each rank keeps a whole state.
        """
        config = self.config
        world = self.world
        membership = self.membership
        self._during = "rendezvous"
        # Built once: hooks on the parameters stay, and two that reduce would sum each gradient twice.
        state = self._state = self._state or fresh_state(config, world, self.parts, self._optimizers)

        # Each rank reports its progress. A state that it has received is as it was then.
        if self._received is not None:
            state.load(self._received, behind=True)
        reports = world.gather(membership.report(state, self.waits, self._state_at, world.program))
        _check_same_session(reports, len(world.program.begun))
        if survivors_differ(reports):
            resumes = "the same command resumes from the last commit"
            raise ReplicasDiffer(f"the survivors of a fault hold different weights: {resumes}")
        from_disk = not any(report.survives for report in reports)

        # Rank 0 claims the run folder and, if no rank has a state, loads the last commit.
        claim = together(world, lambda: self._claim(reports, from_disk=from_disk))
        membership.run_dir = folder = world.broadcast(membership.run_dir, 0)
        assert folder is not None
        world.program.folder = world.program.folder or (folder.parent if self.name else folder)

        # All ranks load the state of one rank, unless all have it already.
        root = 0 if from_disk else most_advanced(reports)
        in_between = not from_disk and any(report.survives and report.waits[-1] >= 0 for report in reports)
        if from_disk or len({(report.digest, report.state_at) for report in reports}) > 1:
            received = synchronize(state, world, root, behind=self.has_joined)
            if received is not None and not from_disk:
                self._received = received
                self._state_at = reports[root].state_at  # type: ignore[assignment]  # a label travels as a tuple
            membership.survives = not from_disk  # a state from disk is loaded again until rank 0 has opened the folder
            confirm_equal(state, world)
        self.compares = in_between and len({(report.digest, report.waits) for report in reports}) > 1

        # The program has set the learning rate for the size of a step that is interrupted.
        self._resizes = config.batch.on_resize == "per-worker"
        if not in_between:
            self.resize()
        before = () if from_disk else world.broadcast(membership.members, root)
        membership.join(before, reports, state.progress.step)
        self.output.open(claim, state)
        self._begin_world()
        self.note_writes()
        if not self.has_joined:
            self._clock.reset()
            self._before = state.seconds
        self._during = "training"

    def come_to(self, label: Label) -> None:
        """Come to a point of the program."""
        if self._received is None:  # else the others have begun the next step before they could do so
            self.resize()
        self.catch_up(label)

    def catch_up(self, label: Label) -> None:
        """Come to a place; take the received weights once more if the rank that has sent them was here.

        A rank that was behind has run its own code on them. Code that changes weights has changed them twice.
        """
        self.waits = label
        if self._received is None or label < self._state_at:
            return
        received = self._received
        self._received = None
        if label == self._state_at:
            self.state.load(received, behind=True)
            self.note_writes()

    def resize(self) -> None:
        """Fit the global batch to the number of ranks, if the config says so. Called when no step is half done."""
        if self._resizes:
            samples = self.parts.train_loader.num_samples
            self.state.layout = resized_layout(self.config.batch, self.world.place.size, samples)
            self._resizes = False
            self._batches = None

    def _claim(self, reports: Sequence[RankReport], *, from_disk: bool) -> RunFolder | None:
        """Claim the run folder on rank 0, and load its last commit if `from_disk`."""
        state = self.state
        place = self.world.place
        if place.rank != 0:
            return None
        if from_disk:
            state.data = self.parts.identity
        if self.output.replays is not None:
            self.output.replay(state, self.output.replays)
            self.membership.run_dir = self.output.replays
            return None
        claim = self.output.claim(
            state,
            next((report.run_dir for report in reports if report.run_dir), None),
            lambda: choose_layout(self.config.batch, place.size, self.parts.train_loader.num_samples),
            from_disk=from_disk,
        )
        self.membership.run_dir = claim.path
        return claim

    def _begin_world(self) -> None:
        """Make what belongs to this world. Raises RankLost."""
        config = self.config
        parts = self.parts
        state = self.state
        journal = self.output.journal
        self.split = split_on(parts.device)  # the phases of the steps
        self.updater = Updater(config, self.world, parts.model, parts.device, parts.training, self.split)
        steps = config.run.profiled_steps
        assert self.membership.run_dir is not None
        name = f"steps-{steps.start}-to-{steps.stop - 1}-rank-{self.world.place.rank}.json.gz"
        file = self.membership.run_dir / "profile" / name
        self.profile = Profile(steps, file, parts.device, journal, self.stopwatch, self.split)
        self._batches = self.last_update = None
        epochs = config.schedule.epochs
        num_samples = self.epoch_size
        limit = config.run.max_seconds
        journal.begin(epochs, num_samples, parts.task.sample, parts.task.best, limit)
        journal.catch_up(state.recent, state.last_step, state.last_epoch)
        self.profile.step_done(state.progress.step)
        self.stopwatch.restart()

    def _announce(self) -> None:
        """Show the user the training and its machines."""
        state = self.state
        parts = self.parts
        place = self.world.place
        journal = self.output.journal
        text = describe(self.config, parts, state, place)
        journal.event(
            "start",
            f"{self.name}: {text}" if self.name else text,
            world_size=place.size,
            num_samples=parts.train_loader.num_samples,
            epoch_samples=self.epoch_size,
            order="own" if "order" in parts.identity else self.config.batch.order,
            seed=self.config.seed,
            best=parts.goal.name,
            higher=parts.goal.higher,
            sample=parts.task.sample,
        )
        hosts = [member.host for member in self.membership.members]
        self.output.write(run_folder.ENVIRONMENT, run_folder.environment(hosts, gpu_name(parts.device)))
        self.output.write(run_folder.DATA, state.data)
        if state.progress.step == 0:
            for note in parts.notes:
                journal.event("note", note)

    def begin(self, label: Label, own: SimpleNamespace) -> None:
        """Begin an update or evaluation of all ranks: if one had to catch up, they compare what they hold.

        Raises: UsageError: if the ranks' programs are at different places; ReplicasDiffer: if what they hold differs;
        RankLost.
        """
        self.look_for_writes()
        self.catch_up(label)
        if not self.compares:
            return
        of_code = {f"register({name}=...)": each for name, each in values_of(own).items()}
        of_code["settings of the optimizer"] = self.state.settings()
        digests_of_own = {name: digest_of(text_of(each), tensors_in(each)) for name, each in of_code.items()}
        mine = label, self.state.digest(), digests_of_own
        labels, digests, of_own = zip(*self.world.gather(mine), strict=True)
        if len(set(labels)) > 1:
            raise UsageError(f"the programs of the ranks are at different places ({labels}): register what decides")
        if odd := [name for each in of_own for name in each if each[name] != of_own[0].get(name)]:
            raise ReplicasDiffer(
                f"{first_few([*dict.fromkeys(odd)])} differ between ranks: code that changes them must do the same on "
                "all ranks; a module that runs in the steps, such as a momentum encoder, is one of the session's models"
            )
        if len(set(digests)) > 1:
            names = first_few(different_tensors(self.state, self.world), 3)
            raise ReplicasDiffer(f"ranks hold different weights ({names}): the loop must do the same on all ranks")
        self.compares = False

    def record(self, label: Label, answer: Answer) -> None:
        """Note what an update or evaluation has given."""
        self.state.answers[label] = answer
        self.updater.attempt = None
        if found := self.updater.differing_buffers - self._differing_buffers:
            self._differing_buffers |= found
            names = first_few(sorted(found), 3)
            kept = "only those of its first one are kept: see Buffers in docs/loops.md"
            self.output.journal.event("note", f"each micro-batch of a step has its own changes of {names}; {kept}")
        self.note_writes()

    # Work

    @property
    def epoch_size(self) -> int:
        """The samples of an epoch."""
        return epoch_size(self.config.batch, self.state.layout, self.parts.train_loader.num_samples)

    @property
    def seconds(self) -> float:
        """Seconds of training of the run so far, by the clock of this rank."""
        return self._before + self._clock.seconds

    def gpu_load(self) -> dict[str, float]:
        """Return the load of this rank's GPU, if the last look at it is long ago; else nothing."""
        if not self._gpu_timer.due:
            return {}
        self._gpu_timer.reset()
        return gpu_load(self.parts.device)

    def note_writes(self) -> None:
        """Note that all writes to weights and buffers so far were not by the program."""
        self.writes.note()

    def look_for_writes(self) -> None:
        """Note whether the program has written to weights or buffers."""
        self.is_whole = self.is_whole and not self.writes.found()

    def undo_step(self) -> None:
        """Undo what the passes of a step have changed that does not end."""
        attempt = self.updater.attempt
        self.updater.undo()
        self.note_writes()
        self.is_whole = self.is_whole and not (attempt and attempt.has_changed_state)

    def next_batch(self, epoch: int) -> Batch:
        """Return this rank's part of the step after the last one that is counted, which is of this epoch.

        Raises UsageError if a sample cannot be used.
        """
        state = self.state
        if self._batches is None:
            place = self.world.place
            loader = self.parts.train_loader
            self._batch = None
            size = self.epoch_size
            work = assignments(self._order(epoch), state.progress.cursor, state.layout, place.rank, place.size, size)
            if os.environ.get(REVERSED):
                work = (replace(batch, micro_batches=batch.micro_batches[::-1]) for batch in work)
            self._batches = Ahead(loader.load(epoch, work), self.split.mark)
        if self._batch is None or self._batch[0] != state.progress.step:
            self._batch = state.progress.step, next(self._batches)
        return self._batch[1]

    def samples_of(self, epoch: int, cursor: int, size: int) -> Indices:
        """Return the numbers of the samples of all ranks in a step, int64 [size]."""
        return self._order(epoch)[cursor : cursor + size]

    def _order(self, epoch: int) -> Order:
        return self.parts.orders(self.config.seed, epoch, self.parts.train_loader.num_samples)

    def prepare_next_batch(self) -> None:
        """Make the next batch ready while gradients are reduced."""
        if self._batches is not None:
            self._batches.prepare()

    def begin_epoch(self) -> None:
        """Begin the steps of an epoch."""
        self._batches = None
        self.stopwatch.restart()
        self.split.restart()

    def votes(self) -> Votes:
        """Return the votes of this rank for the end of the next step."""
        every = self.config.run.commit_steps
        by_steps = every is not None and (self.state.progress.step + 1) % every == 0
        got_signal = self.stop.received is not None
        request = self.world.requested(got_signal=got_signal)
        return Votes(
            stop=request == "stop",
            commit=by_steps or self.commit_timer.due or (got_signal and request == "change"),
            change=request == "change",
            seconds=self.seconds if self.world.place.rank == 0 else 0.0,
        )

    def evaluate(self, task: Task, measuring: Measuring, loader: Loader, model: nn.Module) -> Scores:
        """Return a model's scores on all samples of a loader, the same on every rank. Raises RankLost."""
        return evaluate(self.config, self.parts.device, task, measuring, model, loader, self.world)

    # The end

    @property
    def time_is_up(self) -> bool:
        """Whether the run has trained for as long as it may, in which all ranks agree."""
        limit = self.config.run.max_seconds
        return limit is not None and self.state.seconds >= limit

    def why(self) -> str | None:
        """Return why the training ends now, or None. It follows from the state, so no restart trains beyond it."""
        schedule = self.config.schedule
        state = self.state
        best = state.best
        last = state.last
        epoch = state.progress.epoch
        if epoch >= schedule.epochs:
            return "done"
        if self.time_is_up:
            return f"--max-time {self.config.run.max_time} reached"
        for goal, value in targets_of(self.parts.task, schedule).items():
            if last and not goal.better(value, last.figures[goal.name]):
                return f"target {goal.name} {value:g} reached"
        if best and schedule.patience and epoch - best.epoch >= schedule.patience:
            return f"nothing better since epoch {best.epoch}"
        return None

    def finish(self, *, finished: bool, why: str = "") -> Result:
        """Write the final files and return the result once they are on disk.

        If a rank is lost meanwhile, nothing is closed yet: the next world of an elastic job writes the files.
        """
        state = self.state
        world = self.world
        output = self.output
        self.profile.drop("the training has ended")
        if finished:
            confirm_equal(state, world)
        received, peaks = zip(*world.gather((self.stop.received, peak_memory_gib(self.parts.device))), strict=True)
        signals = [number for number in received if number is not None]
        saved = result_of_rank_0(world, output.commit_last(state, final_weights=finished))
        test = self._test() if finished else None
        best = state.best
        last = state.last
        progress = state.progress
        result = Result(
            run_dir=output.path,
            finished=finished,
            saved=saved,
            stopped_by=signals[0] if signals and not finished else None,
            epochs=progress.epoch,
            steps=progress.step,
            scores=last.figures if last else {},
            best=best.figures if best else {},
            best_epoch=best.epoch if best else None,
            test=test.figures if test else {},
            why=self.why() or why,
            samples_per_second=self.stopwatch.samples_per_second,
            world_size=world.place.size,
            seconds=time.perf_counter() - self._started,
            peak_memory_gib=round(max(peaks), 3),
        )
        if test is not None:
            output.journal.evaluation("test", test.figures, progress.step, shown=False)
        if finished and saved:  # a summary marks the run as finished
            saved = output.journal.complete() and output.write(run_folder.SUMMARY, summary(result, self.config))
            result = replace(result, saved=world.broadcast(saved, 0))
        output.journal.event("end", ending(result, self.parts.task))
        if self.config.run.copy_to and not result_of_rank_0(world, output.copy_last()):
            result = replace(result, saved=False)
        return result

    def _test(self) -> Scores | None:
        """Score the best weights on the test set, if any; the last ones if no best ones are on disk."""
        parts = self.parts
        run_dir = self.output.path or self.output.replays
        if parts.test_loader is None:
            return None
        best = self.world.broadcast(checkpoint.read_weights(run_dir / checkpoint.BEST) if run_dir else None, 0)
        model = self.state.result
        last = to_host(buffers.kept(model.state_dict()))
        if best is not None:
            weights.load(best, model)
        try:
            return self.evaluate(parts.task, parts.evaluation, parts.test_loader, model)
        finally:
            weights.load(last, model)

    def ended_with(self, result: Result) -> None:
        """Tell the driver of an elastic job that the training has ended, finished or stopped."""
        self.world.leave(failed=False)
        self.world.program.ended.append(result)
        exit_report.training_ended(os.environ, result.exit_code, result.steps, is_last=not self.name)

    def end_with(self, error: BaseException) -> BaseException:
        """Commit what is done, tell the driver of an elastic job, and return the error that ends this process."""
        self.world.leave(failed=isinstance(error, Exception))
        self.look_for_writes()
        if isinstance(error, RankLost):
            return self._committed(error)
        if isinstance(error, SystemExit):  # the job continues without this process, or ends
            self._commit_own()
            return error if self.stop.received is None else SystemExit(128 + self.stop.received)
        if not isinstance(error, Exception):
            return error
        if isinstance(error, (ValueError, RuntimeError)) and self._during == "training":
            attempt = self.updater.attempt
            error = (of_use(error, attempt.batch) if attempt else None) or error
        steps = self._state.progress.step if self._state else 0
        is_of_user = self._during == "training" and not isinstance(error, HvdTrainError)
        if steps and (is_of_user or isinstance(error, (UsageError, FaultRepeats))) and self._commit_own():
            say(f"step {steps} is committed; the same command resumes from there")
        if isinstance(error, HvdTrainError) and self.membership.members and not error.of_all_ranks:
            error.raised_by = self.world.place.rank
        exit_report.send(os.environ, error, self._during, steps)
        return error

    def _commit_own(self) -> bool:
        """Commit what this rank has, if it is whole; return whether it is on disk."""
        if self._state is None or not self.membership.survives or self.output.path is None:
            return False
        if not self.is_whole:
            say("weights have changed since the last step, so a commit now could not be resumed exactly")
            return False
        try:
            return self.output.commit_last(self._state).result()
        except UsageError as error:
            say(f"there is no commit now: {error}")
            return False

    def _committed(self, error: RankLost) -> RankLost:
        """Commit the last finished step, and return the error with the outcome."""
        state = self._state
        if state is None or not self.membership.survives:
            return error
        if self.output.path is None:
            kept = "done, and for rank 0 to commit; the same command resumes from the last commit"
        elif self._commit_own():
            kept = "committed; the same command resumes from there"
        else:
            kept = "NOT committed (see above); the same command resumes from the last commit"
        return RankLost(f"another rank ended or cannot be reached ({error}); step {state.progress.step} is {kept}")

    def close(self) -> None:
        """Finish what is being written, end the loader processes, and leave the model to others."""
        self.output.close()
        self.world.unwrap()
        for loader in (self.parts.train_loader, self.parts.val_loader, self.parts.test_loader):
            if loader is not None:
                loader.close()


def _check_same_session(reports: Sequence[RankReport], mine: int) -> None:
    """Raise if ranks are in different trainings of a program: a rank was lost when one ended, or a newcomer began.

    Raises: RankLost: in the last one, since the others are about to come there; Overtaken: in an earlier one.
    """
    last = max(reports, key=lambda report: report.session)
    if mine < last.session:
        over = Overtaken(
            f"the job is in training {last.session} of its program, and this host has no files of training {mine}: "
            "name an --output-dir that all hosts share"
        )
        over.result = last.ended
        raise over
    if any(report.session < mine for report in reports):
        raise RankLost("another rank is in the training before")
