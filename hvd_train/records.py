"""What is counted after a step and an epoch, and the records of both."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hvd_train.errors import first_few
from hvd_train.membership import Membership
from hvd_train.network import optim
from hvd_train.network.device import gpu_load, peak_memory_gib
from hvd_train.progress.metrics import Totals
from hvd_train.run_files.journal import EpochRecord, StepRecord
from hvd_train.state import Answer
from hvd_train.tasks.task import LOSS


def count_step(ranks: Membership, result: Answer) -> None:
    """Count a step that all ranks have done, show it, and write it down."""
    state = ranks.state
    journal = ranks.output.journal
    size = result.totals.count
    state.count_step(result.totals, skipped=result.skipped, loss_scale=result.loss_scale)
    ranks.clock.step(size)
    step = state.progress.step
    _report_slow_ranks(ranks)
    _share_by_speed(ranks)
    if result.fingerprint is not None:
        # It is summed with the gradients, so every rank that has finished a step has its entry.
        world_size = ranks.world.place.size
        epoch_size = ranks.batches.epoch_size
        journal.took(state.enter_step(result.fingerprint, result, world_size, epoch_size))
    if journal.line_is_due:
        journal.progress(_epoch_so_far(ranks), state.progress.cursor)
    change = ranks.change
    if change is not None and step == change.step + 1:
        seconds = time.perf_counter() - ranks.left_at
        journal.world(change.describe(seconds), change.facts(step, seconds))
    if result.skipped and not result.has_finite_loss:
        text = f"step {step} is skipped: its loss is not finite"
        journal.event("skipped", text, step=step)
    if step % ranks.config.run.log_steps == 0:
        record = _of_step(ranks, result)
        state.log_step(record)
        journal.step(record)


def _report_slow_ranks(ranks: Membership) -> None:
    for rank, slow in ranks.updater.pace.take_changes().items():
        host = ranks.members[rank].host
        facts = {"step": ranks.state.progress.step, "rank": rank, "host": host}
        if slow is None:
            text = f"rank {rank} on {host} is as fast as the others again"
            ranks.output.journal.event("recovered", text, **facts)
        else:
            text = f"rank {rank} on {host} is {slow}"
            ranks.output.journal.event("slow", text, **facts, **vars(slow))


def _share_by_speed(ranks: Membership) -> None:
    """Let the next step have other shares, if the times of the ranks call for it."""
    shares = ranks.shares
    if not shares.follow_speed:
        return
    layout = ranks.state.layout
    count = ranks.micro_batches
    loss = shares.loss
    shares.follow(ranks.updater.pace, count, ranks.steps)
    if shares.loss and not loss:
        size = math.ceil(layout.global_batch / (4 * ranks.world.place.size))
        ranks.output.journal.event(
            "note",
            f"{count} micro-batches a step are too few to share them by speed: in a new run "
            f"--global-batch-size {layout.global_batch} --batch-size {size} would make steps up to "
            f"{shares.loss:.0%} shorter",
        )
    if not shares.take_change():
        return
    changed = [
        f"rank {rank} on {ranks.members[rank].host} takes {number} of {count} micro-batches"
        for rank, number in shares.changed(count).items()
    ]
    text = first_few(changed) or "all ranks take equal shares of the micro-batches again"
    facts = {"step": ranks.steps, "owners": shares.owners(shares.begins, count)}
    ranks.output.journal.event("shares", text, **facts)


def of_updates(updates: Sequence[tuple[str, Answer]], num_samples: int) -> Answer:
    """Return the result of a step of several updates, given by the optimizer's name and
    what all ranks know of it.

    Its loss is the mean over the updates; the measures of each have the optimizer's name in front.
    """
    totals = Totals(num_samples)
    for optimizer, answer in updates:
        sums, divisors = (
            {LOSS: values[LOSS], **{f"{optimizer}_{name}": value for name, value in values.items()}}
            for values in (answer.totals.sums, answer.totals.divisors)
        )
        totals += Totals(0, sums, divisors)  # all updates see the same samples
    _, last = updates[-1]
    skipped = all(answer.skipped for _, answer in updates)
    norm = math.hypot(*(answer.gradient_norm for _, answer in updates))
    return replace(last, totals=totals, skipped=skipped, gradient_norm=norm)


def end_epoch(ranks: Membership, scores: Mapping[str, float] | None) -> None:
    """Write down the epoch with the figures of its evaluation, and begin the next one."""
    state = ranks.state
    seconds = ranks.clock.seconds
    before = state.last_epoch.total_seconds if state.last_epoch else 0.0
    record = replace(
        _epoch_so_far(ranks),
        scores=scores,
        seconds=round(seconds - before, 3),
        total_seconds=round(seconds, 3),
        peak_memory_gib=round(peak_memory_gib(ranks.parts.device), 3),
    )
    ranks.output.journal.epoch(record)
    state.end_epoch(record)


def _epoch_so_far(ranks: Membership) -> EpochRecord:
    state = ranks.state
    return EpochRecord(
        epoch=state.progress.epoch + 1,
        step=state.progress.step,
        measures=state.totals.means(),
        scores=None,
        samples_per_second=ranks.clock.samples_per_second,
        total_seconds=ranks.clock.seconds,
    )


def _of_step(ranks: Membership, result: Answer) -> StepRecord:
    state = ranks.state
    progress = state.progress
    clock = ranks.clock
    return StepRecord(
        epoch=progress.epoch + 1,
        step=progress.step,
        samples=progress.epoch * ranks.batches.epoch_size + progress.cursor,
        measures=result.totals.means(),
        learning_rate=optim.learning_rate_of(state.optimizer),
        gradient_norm=result.gradient_norm,
        loss_scale=state.scaler.get_scale() if state.scaler.is_enabled() else None,
        skipped_steps=progress.skipped,
        samples_per_second=clock.samples_per_second,
        split=clock.split.take(),
        gpu=gpu_load(ranks.parts.device) if clock.gpu_looks.comes() else {},
        ranks=ranks.updater.pace.spread,
    )
