"""Train one process in all worlds of a job: synchronize the state, train, finish; describe it for the user."""

import copy
import math
import os
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hvd_train import checkpoint, loop
from hvd_train.config import Config
from hvd_train.data import identity
from hvd_train.elastic.members import RankReport, most_advanced, survivors_differ
from hvd_train.errors import FaultRepeats, HvdTrainError, RankLost, ReplicasDiffer, UsageError, counted
from hvd_train.job import Arrival, Clocks, Job, WorldChanged, reason_to_end
from hvd_train.launch import exit_report
from hvd_train.launch.exit_report import During
from hvd_train.membership import Membership, commit_for_all, synchronize
from hvd_train.network import weights
from hvd_train.network.device import check_own_gpus, gpu_name, split_on
from hvd_train.network.models import micro_batch_sizes
from hvd_train.output import Claim, Output
from hvd_train.parts import NOTHING, Own, build_updater, fresh_state, warm_parts
from hvd_train.plugin import is_reference
from hvd_train.profiling import Profile
from hvd_train.progress.order import choose_layout, resized_layout
from hvd_train.progress.stop import StopSignal
from hvd_train.run_files.journal import figure, labelled
from hvd_train.state import TrainState, confirm_equal
from hvd_train.tasks.measures import LOSS
from hvd_train.tasks.task import Scores, Task
from hvd_train.world.world import DriverLost, World, result_of_rank_0, together

_ranks = partial(counted, noun="rank")


@dataclass(frozen=True)
class Result:
    """How a training ended. Figures are by name; without an evaluation there are none."""

    run_dir: Path | None
    finished: bool
    saved: bool  # whether the last commit, the weights and the summary are on disk; the same on all ranks
    stopped_by: int | None  # the number of the signal that stopped any rank; None if no signal did
    epochs: int
    steps: int
    scores: Mapping[str, float]  # of the last evaluation
    best: Mapping[str, float]  # of the best evaluation
    best_epoch: int | None
    test: Mapping[str, float]  # of the best weights on the test set
    why: str  # why the training ended: the last epoch is done or an aim was reached; empty if it was stopped
    samples_per_second: float
    world_size: int
    seconds: float


class Training:
    """A training, built once. Each world calls `_synchronize`, then `_train`."""

    def __init__(self, config: Config, world: World, stop: StopSignal, own: Own = NOTHING) -> None:
        self._config, self._world, self._stop = config, world, stop
        self._clocks = Clocks.of(config)
        self._parts, self._optimizer = world.prepare(lambda: warm_parts(config, world, own))
        check_own_gpus(world, self._parts.device)
        world.compare(identity.facts(self._parts.data))
        self._output, self._membership = Output(config), Membership()
        self._state: TrainState | None = None
        self._arrival: Arrival | None = None
        self._during: During = "building"

    def run(self) -> Result:
        """Train to the end and return the result; report errors to an elastic driver.

        Raises: RankLost: if no other world can form; finished steps are committed then.
        """
        lost: RankLost | None = None
        try:
            while True:
                self._world.meet(self._synchronize, lost)
                try:
                    result = self._train()
                    self._world.leave(failed=False)
                    return result
                except WorldChanged:
                    lost = None
                except RankLost as error:
                    lost = error
        except RankLost as error:
            self._world.leave(failed=True)
            raise self._committed(error) from error
        except SystemExit:  # the job continues without this process, or ends
            self._world.leave(failed=False)
            self._commit_own()
            if self._stop.received is not None:
                raise SystemExit(128 + self._stop.received) from None
            raise
        except Exception as error:
            self._world.leave(failed=True)
            has_trained = self._membership.has_trained
            if isinstance(error, (UsageError, FaultRepeats)):
                self._commit_own()
            if isinstance(error, HvdTrainError) and has_trained and not error.of_all_ranks:
                error.raised_by = self._world.place.rank
            exit_report.send(os.environ, error, self._during, self._state.progress.step if self._state else 0)
            raise

    def close(self) -> None:
        """Finish what is being written, and end the loader processes."""
        self._output.close()
        self._membership.close()
        for loader in (self._parts.train_loader, self._parts.val_loader, self._parts.test_loader):
            if loader is not None:
                loader.close()

    def _synchronize(self) -> None:
        """Give all ranks the state of the survivor that has done the most steps.

        If no rank survives, or survivors differ, they load the last commit; without a commit they start fresh. Raises:
        ReplicasDiffer: if survivors differ without a commit, or ranks differ after loading; UsageError: if rank 0
        cannot claim the run folder, or the batch does not fit the data; RankLost: each rank keeps a whole state.
        """
        config, world, membership, self._during = self._config, self._world, self._membership, "rendezvous"
        # Built once: an optimizer that is wrapped twice sums gradients twice.
        state = self._state = self._state or fresh_state(config, world, self._parts, self._optimizer)

        # Each rank reports its progress. If survivors of one step differ, all drop their state.
        reports = world.gather(membership.report(state))
        if differ := survivors_differ(reports):
            membership.survives = False
        from_disk = differ or not any(report.survives for report in reports)

        # Rank 0 claims the run folder and, if no rank has a state, loads the last commit.
        claim = together(world, lambda: self._claim(reports, from_disk=from_disk))
        membership.run_dir, loaded = world.broadcast((claim.folder.path, claim.loaded) if claim else (None, False), 0)
        if differ and not loaded:
            raise ReplicasDiffer("the survivors of a fault hold different weights, and there is no checkpoint yet")

        # All ranks load the state of one rank, unless all have it already.
        if from_disk or len({report.digest for report in reports}) > 1:
            synchronize(state, world, root=0 if from_disk else most_advanced(reports))
            membership.survives = not from_disk  # a state from disk is loaded again until rank 0 has opened the folder
            confirm_equal(state, world)

        if config.batch.on_resize == "per-worker":
            state.layout = resized_layout(config.batch, world.place.size, self._parts.train_loader.num_samples)
        self._arrival = membership.join(reports, state.progress.step)
        self._output.open(claim, state, world.place)
        self._during = "training"

    def _claim(self, reports: Sequence[RankReport], *, from_disk: bool) -> Claim | None:
        """Claim the run folder on rank 0, and load its last commit if `from_disk`."""
        state, parts, place = self._state, self._parts, self._world.place
        if state is None or place.rank != 0:
            return None
        if from_disk:
            state.data = identity.of(parts.data, sizes=True)
        return self._output.claim(
            state,
            next((report.run_dir for report in reports if report.run_dir), None),
            lambda: choose_layout(self._config.batch, place.size, parts.train_loader.num_samples),
            from_disk=from_disk,
        )

    def _train(self) -> Result:
        """Train in this world to the end, or until the world breaks or changes."""
        assert self._state is not None
        job = self._job(self._state)
        if job.arrival is None:
            self._announce(job)
        try:
            with job.profile.within(job.state.progress.step):
                finished = loop.train(job)
            return self._finish(job, finished=finished)
        except WorldChanged:
            self._membership.leave("hosts came or went")
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
            updater=build_updater(config, world, parts, clocks.split),
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
            arrival=self._arrival,
        )

    def _announce(self, job: Job) -> None:
        """Show the user the training and its machines."""
        job.output.journal.event(
            "start",
            describe(job),
            world_size=job.world.place.size,
            num_samples=job.parts.train_loader.num_samples,
            repeated_augmentation=job.config.data.repeated_augmentation,
            seed=job.config.seed,
            best=job.parts.goal.name,
            higher=job.parts.goal.higher,
            sample=job.parts.task.sample,
        )
        job.output.write_surroundings(self._membership.hosts, gpu_name(job.parts.device), job.state.data)
        if job.state.progress.step == 0:
            for note in job.parts.notes:
                job.output.journal.event("note", note)

    def _finish(self, job: Job, *, finished: bool) -> Result:
        """Write the final files and return the result once they are on disk.

        If a rank is lost meanwhile, nothing is closed yet: the next world of an elastic job writes the files.
        """
        if finished:
            confirm_equal(job.state, job.world)
        signals = [number for number in job.world.gather(self._stop.received) if number is not None]
        saved = result_of_rank_0(job.world, job.output.store.commit_last(job.state, final_weights=finished))
        test = self._test(job) if finished else None
        stopped_by = signals[0] if signals and not finished else None
        result = result_of(job, finished=finished, stopped_by=stopped_by, saved=saved, test=test)
        if finished and not job.world.broadcast(job.output.write_summary(summary(result, job.config)), 0):
            result = replace(result, saved=False)
        job.output.journal.event("end", ending(result, job.config, job.parts.task))
        return result

    def _test(self, job: Job) -> Scores | None:
        """Score the best weights on the test set, if any; the last ones if no best ones are on disk."""
        if job.parts.test_loader is None:
            return None
        run_dir = job.output.path
        best = job.world.broadcast(checkpoint.read_weights(run_dir / checkpoint.BEST) if run_dir else None, 0)
        model = copy.deepcopy(job.state.result)
        if best is not None:
            weights.load(best, model)
        return loop.validate(job, job.parts.test_loader, model)

    def _commit_own(self) -> bool:
        return self._state is not None and self._membership.survives and self._output.commit_last(self._state)

    def _committed(self, error: RankLost) -> RankLost:
        """Commit the last finished step, and return the error with the outcome."""
        state, run_dir = self._state, self._membership.run_dir
        if state is None or not self._membership.survives:
            return error
        if isinstance(error, DriverLost) and self._output.path is None and run_dir is not None:
            kept = commit_for_all(self._output, self._config, state, run_dir)
        elif self._output.path is None:
            kept = "done, and for rank 0 to commit; the same command resumes from the last commit"
        elif self._commit_own():
            kept = "committed; the same command resumes from there"
        else:
            kept = "NOT committed (see above); the same command resumes from the last commit"
        return RankLost(f"another rank ended or cannot be reached ({error}); step {state.progress.step} is {kept}")


def describe(job: Job) -> str:
    """Return one line about the model, the data, the devices and the batch layout."""
    config, training, place = job.config, job.state, job.world.place
    layout, parameters = training.layout, sum(p.numel() for p in training.model.parameters())
    number, sample = len(layout.micro_batches(range(layout.global_batch))), job.parts.task.sample
    sizes = micro_batch_sizes(layout, layout.global_batch)
    line = (
        f"{config.model.model} ({parameters / 1e6:.2f} M parameters) on {config.data.data} "
        f"({job.parts.train_loader.num_samples:,} {sample}s), {_ranks(place.size)} on {job.parts.device.type}, "
        f"{layout.global_batch} {sample}s a step in {number} micro-batch{'es' * (number > 1)} of "
        f"{'up to ' * (len(sizes) > 1)}{max(sizes)}"
    )
    if number < place.size:
        idle = f"{_ranks(place.size - number)} of {place.size} idle"
        line += f"; {idle} (a new run may have smaller micro-batches: --batch-size)"
    if training.progress.step:
        line += f"; resuming at epoch {training.progress.epoch + 1}, step {training.progress.step}"
    return line


def summary(result: Result, config: Config) -> dict[str, Any]:
    """Return the contents of summary.json; numbers that are not known are None."""
    parts = {"scores": "", "best": "best_", "test": "test_"}
    values = {name: value for name, value in vars(result).items() if name not in parts}
    values |= {prefix + n: v for part, prefix in parts.items() for n, v in getattr(result, part).items()}
    known = {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in values.items()}
    return {**known, "run_dir": str(result.run_dir), "recipe": config.recipe, "torch": torch.__version__}


def ending(result: Result, config: Config, task: Task) -> str:
    """Return the last lines that a run prints."""
    if not result.finished:
        name = signal.Signals(result.stopped_by).name if result.stopped_by else "its time limit or its launcher"
        if not result.saved:
            return f"stopped by {name} at step {result.steps}, NOT committed (see above)"
        return f"stopped by {name} at step {result.steps}, committed; the same command resumes from there"
    name, score = task.best, ""
    if result.scores:
        best = f" (best {figure(name, result.best[name])}, epoch {result.best_epoch})" if result.best else ""
        score = f"{labelled(name, result.scores[name])}{best}, "
    for tested in dict.fromkeys([LOSS, name]) if result.test else ():
        score += f"test {labelled(tested, result.test[tested])}, "
    code = config.model.model, config.model.task, config.data.data
    trust = " --trust" if any(map(is_reference, code)) else ""
    lost = "" if result.saved else "\nNOT all files could be written (see above)"
    return (
        f"{result.why}: {score}{result.samples_per_second:,.0f} {task.sample}s/s "
        f"on {_ranks(result.world_size)}, "
        f"{result.seconds:.0f} s\n"
        f"files: {result.run_dir}\n"
        f"next:  hvd-train evaluate {shlex.quote(str(result.run_dir))}{trust}{lost}"
    )


def result_of(job: Job, *, finished: bool, stopped_by: int | None, saved: bool, test: Scores | None) -> Result:
    """Return the result of a job whose loop has ended; see `Result`."""
    best, last, progress = job.state.best, job.state.last, job.state.progress
    return Result(
        run_dir=job.output.path,
        finished=finished,
        saved=saved,
        stopped_by=stopped_by,
        epochs=progress.epoch,
        steps=progress.step,
        scores=last.figures if last else {},
        best=best.figures if best else {},
        best_epoch=best.epoch if best else None,
        test=test.figures if test else {},
        why=reason_to_end(job) or "",
        samples_per_second=job.clocks.stopwatch.samples_per_second,
        world_size=job.world.place.size,
        seconds=time.perf_counter() - job.clocks.started,
    )
