"""The training loop: the page to read first."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from hvd_train import checkpoint, optim, schedule
from hvd_train.checkpoint import Store
from hvd_train.clock import Stopwatch, Timer
from hvd_train.config import Config
from hvd_train.data.loader import Batch, Loader
from hvd_train.journal import EpochRecord, Journal, Moment, StepRecord
from hvd_train.ledger import Entry
from hvd_train.members import Change
from hvd_train.metrics import Totals
from hvd_train.order import EpochOrder, assignments
from hvd_train.state import Evaluation, TrainState
from hvd_train.step import Step, StepResult, Votes
from hvd_train.stop import StopSignal
from hvd_train.validate import Scores, evaluate
from hvd_train.world import World, WorldChanged


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
    job.stopwatch.restart()

    while state.progress.epoch < epochs:
        epoch = state.progress.epoch
        order = EpochOrder(config.seed, epoch, num_samples)
        work = assignments(order, state.progress.cursor, state.cut, place.rank, place.size)
        for batch in job.train_loader.load(epoch, work):
            middle = (state.progress.cursor + batch.size / 2) / num_samples
            learning_rate = peak * schedule.learning_rate_factor(config.schedule, epoch + middle)
            optim.set_learning_rate(state.optimizer, learning_rate)
            log = (state.progress.step + 1) % config.run.log_steps == 0
            entry = ledger_entry(job, batch) if config.run.ledger else None

            result = job.step.take(state, batch, wishes(job), want_norm=log)

            if state.average is not None:
                state.average.update_parameters(state.model)
            state.progress = state.progress.after_step(batch.size)
            state.totals += result.totals
            job.stopwatch.step(batch.size)
            if entry is not None:
                state.recent.append(entry)
                job.journal.took(entry)
            take_down(job, result, learning_rate, log=log)
            if result.agreed.stop:
                job.store.commit(state, wait=True)
                return False
            if result.agreed.commit and job.store.commit(state):
                job.commit_timer.reset()
            if result.agreed.change:
                raise WorldChanged

        with job.stopwatch.paused():
            finish_epoch(job)
    return True


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
    mine = [int(sample) for micro in batch.micro_batches for sample in micro.samples]
    samples = [sample for of_rank in job.world.gather(mine) for sample in of_rank]
    progress = job.state.progress
    return Entry(progress.epoch, progress.step + 1, job.world.place.size, tuple(samples))


def take_down(job: Job, result: StepResult, learning_rate: float, *, log: bool) -> None:
    """Show the step that was just taken and, on the cadence, write it down."""
    progress, speed = job.state.progress, job.stopwatch.images_per_second
    so_far = job.state.totals.means()
    job.journal.moved(Moment(progress.epoch, progress.cursor, progress.step, so_far["loss"], so_far["top1"], speed))
    if job.change is not None and progress.step == job.change.step + 1:
        job.journal.world(job.change, progress.step, job.change.waited + time.perf_counter() - job.since)
    if log:
        job.journal.step(
            StepRecord(
                epoch=progress.epoch + 1,
                step=progress.step,
                samples=progress.epoch * job.train_loader.num_samples + progress.cursor,
                **result.totals.means(),
                learning_rate=learning_rate,
                gradient_norm=result.gradient_norm,
                images_per_second=speed,
            )
        )


def finish_epoch(job: Job) -> None:
    """Evaluate on the cadence, keep the best weights, and move to the next epoch."""
    state, run = job.state, job.config.run
    number = state.progress.epoch + 1
    due = number % run.eval_epochs == 0 or number == job.config.schedule.epochs
    scores = validate(job) if due else None
    if scores is not None:
        state.last = Evaluation(number, scores.loss, scores.top1, scores.top5)
        if state.best is None or state.last.top1 > state.best.top1:
            state.best = state.last
            job.store.save_weights(checkpoint.BEST, state)
    job.journal.epoch(
        EpochRecord(
            epoch=number,
            step=state.progress.step,
            **state.totals.means(),
            val_loss=scores.loss if scores else None,
            val_top1=scores.top1 if scores else None,
            val_top5=scores.top5 if scores else None,
            images_per_second=job.stopwatch.images_per_second,
        )
    )
    state.progress, state.totals, state.recent = state.progress.next_epoch(), Totals(), []


def validate(job: Job) -> Scores | None:
    """Scores on the validation set; None where there is none."""
    if job.val_loader is None:
        return None
    return evaluate(
        job.state.result,
        job.val_loader,
        job.world,
        micro_batch=job.config.batch.eval_batch_size,
        classes=job.classes,
        device=job.device,
        autocast=job.step.autocast(),
    )
