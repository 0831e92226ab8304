"""What is counted, shown and written of a step and of an epoch."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from hvd_train.errors import Diverged
from hvd_train.network.device import peak_memory_gib
from hvd_train.progress.metrics import Totals
from hvd_train.run_files.journal import EpochRecord, StepRecord
from hvd_train.run_files.ledger import Entry, extended
from hvd_train.state import Answer
from hvd_train.tasks.task import LOSS, Scores
from hvd_train.training import Training
from hvd_train.world.world import result_of_rank_0

MOST_SKIPPED_STEPS = 10
"""In a row; then a run ends with an error."""


def count_step(training: Training, result: Answer) -> None:
    """Count a step that all ranks have done, show it, and write it down."""
    state, stopwatch, num_samples = training.state, training.stopwatch, training.parts.train_loader.num_samples
    state.count_step(result.totals, skipped=result.skipped)
    stopwatch.step(result.totals.count)
    journal, progress, speed = training.output.journal, state.progress, stopwatch.samples_per_second
    if result.fingerprint is not None:
        # It is summed with the gradients, so every rank that has finished a step has its entry. This drops the entries
        # of the epoch before. Their lines are on disk: all ranks have begun this step.
        positions = progress.cursor - result.totals.count, progress.cursor
        entry = Entry(progress.epoch, (progress.step,) * 2, training.world.place.size, positions, result.fingerprint)
        state.recent = extended(state.recent, entry, num_samples)
        journal.took(state.recent[-1])
    means = state.totals.means()
    so_far = EpochRecord(progress.epoch + 1, progress.step, means, None, speed, total_seconds=training.seconds)
    journal.progress(so_far, progress.cursor)
    change = training.membership.change
    if change is not None and progress.step == change.step + 1:
        journal.world(change, progress.step, time.perf_counter() - training.membership.left_at)
    if result.skipped and not math.isfinite(result.totals.sums[LOSS]):
        journal.event("skipped", f"step {progress.step} is skipped: its loss is not finite", step=progress.step)
    if progress.step % training.config.run.log_steps == 0:
        state.last_step = StepRecord(
            epoch=progress.epoch + 1,
            step=progress.step,
            samples=progress.epoch * num_samples + progress.cursor,
            measures=result.totals.means(),
            learning_rate=state.optimizer.param_groups[0]["lr"],
            gradient_norm=result.gradient_norm,
            loss_scale=state.scaler.get_scale() if state.scaler.is_enabled() else None,
            skipped_steps=progress.skipped,
            samples_per_second=speed,
            split=training.split.take(),
            gpu=training.gpu_load(),
        )
        journal.step(state.last_step)


def of_updates(answers: Sequence[tuple[str, Answer]], num_samples: int) -> Answer:
    """Return the result of a step of several updates, given by the optimizer's name and what all ranks know of it.

    Its loss is the mean over the updates; the measures of each have the optimizer's name in front.
    """
    totals = Totals(num_samples)
    for optimizer, answer in answers:
        sums, divisors = (
            {LOSS: values[LOSS], **{f"{optimizer}_{name}": value for name, value in values.items()}}
            for values in (answer.totals.sums, answer.totals.divisors)
        )
        totals += Totals(0, sums, divisors)  # all updates see the same samples
    skipped, norm = all(answer.skipped for _, answer in answers), math.hypot(*(a.gradient_norm for _, a in answers))
    return Answer(Scores(totals.means(), num_samples), totals, skipped, norm, answers[-1][1].fingerprint)


def give_up_if_diverged(training: Training, result: Answer) -> None:
    """If too many steps in a row were skipped, commit the weights, which they have not changed, and raise Diverged."""
    state = training.state
    progress = state.progress
    if progress.skipped_in_row < MOST_SKIPPED_STEPS:
        return
    saved = result_of_rank_0(training.world, training.output.commit_last(state))
    finite = math.isfinite(result.totals.sums[LOSS])
    cause = "the loss is finite, but not its gradient" if finite else "the loss is not finite"
    kept = "committed" if saved else "NOT committed (see above)"
    raise Diverged(
        f"{progress.skipped_in_row} steps in a row were skipped; in the last one, step {progress.step}, {cause}; "
        f"the weights are those before them, and {kept}; try a smaller --learning-rate or --clip-norm"
    )


def end_epoch(training: Training, number: int, scores: Scores | None) -> None:
    """Log epoch `number` (from 0) and begin the next one, unless this rank got a state that is in the next one."""
    state = training.state
    if state.progress.epoch != number:
        return
    seconds, before = training.seconds, state.last_epoch.total_seconds if state.last_epoch else 0.0
    state.last_epoch = EpochRecord(
        epoch=number + 1,
        step=state.progress.step,
        measures=state.totals.means(),
        scores=scores.figures if scores else None,
        samples_per_second=training.stopwatch.samples_per_second,
        seconds=round(seconds - before, 3),
        total_seconds=round(seconds, 3),
        peak_memory_gib=round(peak_memory_gib(training.parts.device), 3),
    )
    training.output.journal.epoch(state.last_epoch)
    state.progress, state.totals = replace(state.progress, epoch=number + 1, cursor=0), Totals()
