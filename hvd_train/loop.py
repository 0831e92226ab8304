"""The training loop: the page to read first."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import nn

from hvd_train import checkpoint
from hvd_train.checkpoint import Store
from hvd_train.config import Config, ScheduleConfig
from hvd_train.data.loader import Ahead, Batch, Loader
from hvd_train.elastic.members import Change
from hvd_train.errors import Diverged
from hvd_train.network import freeze, optim
from hvd_train.profiling.profile import Profile
from hvd_train.progress import schedule
from hvd_train.progress.clock import Split, Stopwatch, Timer
from hvd_train.progress.metrics import Totals
from hvd_train.progress.order import assignments, order_of
from hvd_train.progress.stop import StopSignal
from hvd_train.run_files.journal import EpochRecord, Journal, Moment, StepRecord
from hvd_train.run_files.ledger import Entry
from hvd_train.state import Evaluation, TrainState
from hvd_train.step import Step, StepResult, Votes
from hvd_train.validate import Scores, evaluate
from hvd_train.world.world import World, WorldChanged


@dataclass(frozen=True)
class Job:
    """The parts of a run, made by `run` and used here."""

    config: Config
    world: World
    device: torch.device
    state: TrainState
    step: Step
    train_loader: Loader
    val_loader: Loader | None
    classes: tuple[str, ...]
    journal: Journal
    store: Store
    stop: StopSignal
    stopwatch: Stopwatch
    split: Split
    profile: Profile
    commit_timer: Timer
    time_limit: Timer
    change: Change | None
    """How this world came out of another, to be told after its first step."""
    since: float
    """When this rank said how long it had waited for this world (time.perf_counter)."""


def train(job: Job) -> bool:
    """Train from where the state is to the last epoch; False where a wish to stop came first (it is committed).

    Raises WorldChanged, on all ranks after the same step, where one has heard of other hosts.
    """
    config, state, place = job.config, job.state, job.world.place
    epochs, num_samples = config.schedule.epochs, job.train_loader.num_samples
    peak = schedule.peak_learning_rate(config.optimizer, state.cut.global_batch)
    job.journal.begin(epochs, num_samples)
    job.journal.catch_up(state.recent, state.last_step, state.last_epoch)
    job.stopwatch.restart()
    job.split.restart()

    while not ended(config, state):
        epoch = state.progress.epoch
        if freeze.apply(config.model, state.model, epoch):
            job.world.regroup(state.optimizer)
        order = order_of(config.seed, epoch, num_samples, config.data.repeated_augmentation)
        work = assignments(order, state.progress.cursor, state.cut, place.rank, place.size)
        batches = Ahead(job.train_loader.load(epoch, work), job.split.mark)
        for batch in batches:
            middle = (state.progress.cursor + batch.size / 2) / num_samples
            learning_rate = peak * schedule.learning_rate_factor(config.schedule, epoch + middle)
            optim.set_learning_rate(state.optimizer, learning_rate)
            log = (state.progress.step + 1) % config.run.log_steps == 0
            entry = ledger_entry(job, batch) if config.run.ledger else None

            result = job.step.take(state, batch, wishes(job), want_norm=log, meanwhile=batches.prepare)

            if state.average is not None and not result.skipped:
                state.average.update_parameters(state.model)
            state.progress = state.progress.after_step(batch.size, skipped=result.skipped)
            if math.isfinite(result.totals.loss):
                state.totals += result.totals
            job.stopwatch.step(batch.size)
            if entry is not None:
                state.took(entry)
                job.journal.took(entry)
            take_down(job, result, learning_rate, log=log)
            if result.skipped and state.progress.skipped_in_row >= config.precision.max_skipped_steps:
                give_up(job, result)
            if result.agreed.stop:
                job.store.commit(state, wait=True)
                return False
            if result.agreed.commit and job.store.commit(state):
                job.commit_timer.reset()
            if result.agreed.change:
                raise WorldChanged
            job.split.mark("other")
            job.profile.passed(state.progress.step)

        with job.stopwatch.paused():
            finish_epoch(job)
        job.split.restart()
    return True


def ended(config: Config, state: TrainState) -> str | None:
    """Why there is nothing more to train, or None: a function of the state, so that no restart goes on beyond it."""
    schedule, best, last, epoch = config.schedule, state.best, state.last, state.progress.epoch
    if epoch >= schedule.epochs:
        return "done"
    if last and schedule.target_accuracy and last.top1 >= schedule.target_accuracy:
        return f"target accuracy {schedule.target_accuracy:.2%} reached"
    if best and schedule.patience and epoch - best.epoch >= schedule.patience:
        return f"nothing better since epoch {best.epoch}"
    return None


def wishes(job: Job) -> Votes:
    """What this rank wants to happen after the step that is about to be taken."""
    every = job.config.run.commit_steps
    by_steps = every is not None and (job.state.progress.step + 1) % every == 0
    heard = job.world.heard()
    return Votes(
        stop=job.stop.received is not None or job.time_limit.due or heard == "stop",
        commit=by_steps or job.commit_timer.due,
        change=heard == "change",
    )


def ledger_entry(job: Job, batch: Batch) -> Entry:
    """The samples that all ranks are about to take. Before the step: should a rank be lost here, there is none."""
    num_samples = job.train_loader.num_samples
    mine = [int(sample) % num_samples for micro in batch.micro_batches for sample in micro.samples]
    samples = [sample for of_rank in job.world.gather(mine) for sample in of_rank]
    progress = job.state.progress
    return Entry(progress.epoch, progress.step + 1, job.world.place.size, tuple(samples))


def give_up(job: Job, result: StepResult) -> None:
    """Keep what is there, which no skipped step has touched, and raise Diverged with what all ranks know."""
    state = job.state
    job.store.commit(state, wait=True)
    of_ranks = job.world.gather([int(sample) % job.train_loader.num_samples for sample in result.not_finite])
    shown = [f"rank {rank}: samples {numbers(found)}" for rank, found in enumerate(of_ranks) if found]
    reason = f"the loss is not finite ({'; '.join(shown)})" if shown else "the loss is finite, but not its gradient"
    progress = state.progress
    raise Diverged(
        f"{progress.skipped_in_row} steps in a row were skipped; in the last one, step {progress.step}, {reason}; "
        "the weights are those before them, and committed; try a smaller --learning-rate or --clip-norm"
    )


def numbers(found: list[int], most: int = 8) -> str:
    """The first few of them."""
    return ", ".join(map(str, found[:most])) + (f" and {len(found) - most} more" if len(found) > most else "")


def take_down(job: Job, result: StepResult, learning_rate: float, *, log: bool) -> None:
    """Show the step that was just taken and, on the cadence, write it down."""
    progress, speed = job.state.progress, job.stopwatch.images_per_second
    so_far = job.state.totals.means()
    job.journal.moved(Moment(progress.epoch, progress.cursor, progress.step, so_far["loss"], so_far["top1"], speed))
    if job.change is not None and progress.step == job.change.step + 1:
        job.journal.world(job.change, progress.step, job.change.waited + time.perf_counter() - job.since)
    if result.skipped and not math.isfinite(result.totals.loss):
        job.journal.event("skipped", f"step {progress.step} is skipped: its loss is not finite", step=progress.step)
    if log:
        job.state.last_step = StepRecord(
            epoch=progress.epoch + 1,
            step=progress.step,
            samples=progress.epoch * job.train_loader.num_samples + progress.cursor,
            **result.totals.means(),
            learning_rate=learning_rate,
            gradient_norm=result.gradient_norm,
            loss_scale=job.state.scaler.get_scale() if job.state.scaler.is_enabled() else None,
            skipped_steps=progress.skipped,
            images_per_second=speed,
            split=job.split.take(),
        )
        job.journal.step(job.state.last_step)


def finish_epoch(job: Job) -> None:
    """Evaluate on the cadence, keep the best weights, and move to the next epoch."""
    state, config = job.state, job.config
    number = state.progress.epoch + 1
    due = number % config.run.eval_epochs == 0 or number == config.schedule.epochs
    scores = validate(job, job.val_loader, state.result) if due and job.val_loader else None
    if scores is not None:
        state.last = Evaluation(number, scores.loss, scores.top1, scores.top5)
        if state.best is None or better(config.schedule, state.last, state.best):
            state.best = state.last
            job.store.save_weights(checkpoint.BEST, state)
    state.last_epoch = EpochRecord(
        epoch=number,
        step=state.progress.step,
        **state.totals.means(),
        val_loss=scores.loss if scores else None,
        val_top1=scores.top1 if scores else None,
        val_top5=scores.top5 if scores else None,
        images_per_second=job.stopwatch.images_per_second,
    )
    job.journal.epoch(state.last_epoch)
    state.progress, state.totals = state.progress.next_epoch(), Totals()


def better(schedule: ScheduleConfig, evaluation: Evaluation, best: Evaluation) -> bool:
    """Whether an evaluation is better than the best one so far."""
    if schedule.best_by == "loss":
        return evaluation.loss < best.loss or math.isnan(best.loss)
    return evaluation.top1 > best.top1


def validate(job: Job, loader: Loader, model: nn.Module) -> Scores:
    """Scores of a model on a set."""
    return evaluate(
        model,
        loader,
        job.world,
        micro_batch=job.config.batch.eval_batch_size,
        classes=job.classes,
        device=job.device,
        autocast=job.step.autocast(),
    )
