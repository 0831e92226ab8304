"""The training loop: the page to read first. `steps` is all of it; what it calls stands below, in order.

It yields each step to whoever takes it: `by_task.train`, or a loop of the user's own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from dataclasses import replace

from torch import nn

from hvd_train import checkpoint
from hvd_train.data.batches import Ahead, Loader
from hvd_train.errors import Diverged
from hvd_train.goals import deciding, headline, out_of_steps, reason_to_end
from hvd_train.job import Job
from hvd_train.network import freeze, optim
from hvd_train.network.device import autocast
from hvd_train.network.usage import usage
from hvd_train.progress import schedule
from hvd_train.progress.metrics import Totals
from hvd_train.progress.order import assignments, order_of
from hvd_train.progress.slow_ranks import Times, spread
from hvd_train.recheck import Rechecks
from hvd_train.run_files.ledger import Entry
from hvd_train.run_files.records import EpochRecord, Moment, Plan, StepRecord
from hvd_train.state import Evaluation, difference, first_few
from hvd_train.step import Step, StepResult, Votes
from hvd_train.suspicions import Difference, StatesDiffer
from hvd_train.tasks.meter import Meter
from hvd_train.validate import Scores, evaluate
from hvd_train.world.world import WorldChanged, result_of_rank_0

TRIAL_PASSES = 3  # of each evaluation
MOST_NAMED = 8  # slow ranks, after one step
LEAST_PAUSE = 200  # between two comparisons of states, in times of how long one takes


def steps(job: Job) -> Generator[Step, None, bool]:
    """Yield the steps from where the state is to the last epoch; return False where a wish to stop came first.

    Raises WorldChanged, on all ranks after the same step, where one has heard of other hosts, StatesDiffer where one
    holds another state than the others or computes other gradients, Diverged where step
    after step has a loss or gradient that is not finite, and RankLost where another rank is gone: no step is half done.
    """
    config, world, state, parts, clocks = job.config, job.world, job.state, job.parts, job.clocks
    journal = job.output.journal
    num_samples = parts.train_loader.num_samples
    peak = schedule.peak_learning_rate(config.optimizer, state.cut.global_batch)
    floor = config.schedule.min_learning_rate / config.optimizer.learning_rate
    task, total, last = parts.meter.task, config.schedule.total_seconds, config.schedule.last_step
    plan = Plan(
        config.schedule.epochs,
        num_samples,
        shown=headline(config.schedule, task),
        unit=parts.unit,
        figures=[figure.name for figure in task.all_figures],
        most_samples=None if last is None else state.cut.global_batch * last,
        seconds_left=None if total is None else total - state.spent.total,
    )
    journal.begin(plan)
    journal.catch_up(state.recent, state.last_step, state.last_epoch)
    rechecks = Rechecks(job)
    clocks.stopwatch.restart()
    clocks.split.restart()

    while not reason_to_end(config, task, state):
        # the parameters that are trained in this epoch
        epoch = state.progress.epoch
        if freeze.apply(config.model, state.model, epoch):
            world.regroup(state.optimizer)

        # this rank's samples of every step that is left in the epoch, as batches on its device
        order = order_of(config.seed, epoch, num_samples, config.data.repeated_augmentation)
        share = job.share.number, job.share.ranks, job.balance.deal()
        work = assignments(order, state.progress.cursor, state.cut, *share)
        batches = Ahead(parts.train_loader.load(epoch, work), clocks.split.mark)
        step = job.steps.at_end_of_epoch(state)
        if state.progress.cursor == num_samples:
            yield step

        for batch in batches:
            # the learning rate in the middle of this batch, as a function of the samples seen
            middle = (state.progress.cursor + batch.size / 2) / num_samples
            factor = schedule.learning_rate_factor(config.schedule, epoch + middle, floor)
            learning_rate = optim.set_learning_rate(state.optimizer, peak * factor)

            # one optimizer step of all ranks; while the gradients travel, the next batch is prepared
            log = (state.progress.step + 1) % config.run.log_steps == 0
            is_last = state.progress.cursor + batch.size == num_samples
            votes = wishes(job)
            recheck = rechecks.is_due(state.progress.step + 1, before_commit=votes.commit or is_last)
            step = job.steps.begin(
                state,
                batch,
                replace(votes, recheck=recheck),
                want_norm=log,
                meanwhile=batches.prepare,
                note=count(job, learning_rate, log=log),
                is_last=is_last,
                keep=rechecks.slot_of(state.progress.step + 1, batch.num_slots),
                times=job.own_times.tell() if log and tells(job) else (),
            )
            job.own_times.took(sum(batch.own_sizes))
            yield step

            # do what the ranks have agreed on
            agreed = step.result.agreed
            if agreed.end:
                state.spent = replace(state.spent, limit=total)
            if agreed.stop:
                return False
            if agreed.commit or agreed.check:
                verify(job)
            if agreed.recheck:
                agree(job, rechecks.contradiction(step, batch.num_slots))
            if agreed.commit:
                if job.output.store.commit(state):
                    clocks.commit_timer.reset()
                clocks.split.mark("commit")
            if agreed.change:
                raise WorldChanged
            if not step.ends_epoch and (agreed.end or out_of_steps(config.schedule, state.progress)):
                return True
            clocks.split.mark("other")
            if job.balance.is_new and not step.ends_epoch:
                break
        else:
            # keep the best weights, go to the next epoch
            step.confirm()
            with clocks.stopwatch.paused():
                finish_epoch(job, step.scores)
            clocks.split.restart()
    return True


def tells(job: Job) -> bool:
    """Return whether the ranks tell each other of their times in the next step, if it is logged."""
    return job.world.place.size > 1 and job.own_times.is_due(job.state.progress.step + 1)


def count(job: Job, learning_rate: float, *, log: bool) -> Callable[[StepResult], None]:
    """Return what counts a step that was just taken, shows it and writes it down."""
    state = job.state

    def taken(result: StepResult) -> None:
        state.count_step(result.totals, skipped=result.skipped)
        state.spent = state.spent.more(job.clocks.lap.take())
        job.clocks.stopwatch.step(result.totals.count)
        if result.fingerprint is not None:
            account_for(job, result.totals.count, result.fingerprint)
        take_down(job, result, learning_rate, log=log)
        if state.progress.skipped_in_row >= job.config.precision.max_skipped_steps:
            give_up(job, result)
        if not (result.agreed.stop or result.agreed.change):
            job.clocks.split.mark("other")
            job.profile.step_done(state.progress.step)

    return taken


def wishes(job: Job) -> Votes:
    """Return what this rank wants to happen after the step that is about to be taken."""
    every = job.config.run.commit_steps
    by_steps = every is not None and (job.state.progress.step + 1) % every == 0
    by_time = job.clocks.commit_timer.due and not job.output.store.is_busy
    told_to_end = job.stop.received is not None
    request = job.world.requested(told_to_end=told_to_end)
    total = job.config.schedule.total_seconds
    return Votes(
        stop=job.clocks.time_limit.due or request == "stop",
        commit=by_steps or by_time or (told_to_end and request == "change"),
        change=request == "change" or job.handover.is_done,
        end=total is not None and job.state.spent.total + job.clocks.lap.look() >= total,
        check=job.clocks.check_timer.due,
    )


def verify(job: Job) -> None:
    """Compare the states of all ranks. Raises StatesDiffer, on each of them, where one holds another than the others.

    What is committed and what becomes the best weights was compared before: memory that fails, or a program that treats
    one rank otherwise, spoils no file.
    """
    if job.world.place.size == 1:
        job.clocks.check_timer.reset()
        job.state.verified_step = job.state.progress.step
        return
    begun = time.perf_counter()
    with job.clocks.stopwatch.paused():
        found = difference(job.state, job.world, has_state=job.share.number is not None)
    job.clocks.split.restart()
    job.clocks.check_timer.reset(at_least=LEAST_PAUSE * (time.perf_counter() - begun))
    agree(job, found)
    job.state.verified_step = job.state.progress.step


def agree(job: Job, found: Difference | None) -> None:
    """Raise StatesDiffer, on all ranks, where a comparison has `found` a rank that is wrong.

    A wrong gradient, too, may be in the states of all: they go back.
    """
    if found is not None:
        step, hosts = job.state.progress.step, job.hosts
        wrong = {"ranks": list(found.odd), "hosts": [hosts[rank] for rank in found.odd]}
        job.output.journal.event("differ", found.message, step=step, **wrong)
        job.suspicions.note(found, job.state.verified_step or 0, hosts)
        raise StatesDiffer(found)


def account_for(job: Job, count: int, fingerprint: int) -> None:
    """Write into the ledger which `count` positions of the epoch's order the step had, and what its ranks took.

    The fingerprint of the samples has come with the gradients, so all ranks that have finished a step have its entry.
    """
    state, num_samples = job.state, job.parts.train_loader.num_samples
    progress = state.progress
    positions = progress.cursor - count, progress.cursor
    step = Entry(progress.epoch, (progress.step, progress.step), job.share.ranks, positions, fingerprint)
    job.output.journal.took(state.took(step, num_samples))


def take_down(job: Job, result: StepResult, learning_rate: float, *, log: bool) -> None:
    """Show the step that was just taken and, where `log` says so, write it down."""
    journal, progress = job.output.journal, job.state.progress
    meter, totals, speed = job.parts.meter, job.state.totals, job.clocks.stopwatch.images_per_second
    journal.progress(
        Moment(progress.epoch, progress.cursor, progress.step, lambda: meter.figures(totals), speed),
    )
    if job.arrival is not None and progress.step == job.arrival.change.step + 1:
        journal.world(job.arrival.change, progress.step, job.arrival.seconds())
    if result.skipped and not math.isfinite(result.totals.loss):
        journal.event("skipped", f"step {progress.step} is skipped: its loss is not finite", step=progress.step)
    if result.times is not None:
        num_steps = job.own_times.heard(result.times, progress.step)
        name_slow_ranks(job, result.times, num_steps)
        deal_by_speed(job, result.times, num_steps)
    if log:
        job.state.last_step = StepRecord(
            epoch=progress.epoch + 1,
            step=progress.step,
            samples=progress.epoch * job.parts.train_loader.num_samples + progress.cursor,
            scores=meter.figures(result.totals),
            learning_rate=learning_rate,
            gradient_norm=result.gradient_norm,
            loss_scale=job.state.scaler.get_scale() if job.state.scaler.is_enabled() else None,
            skipped_steps=progress.skipped,
            images_per_second=speed,
            split=job.clocks.split.take(),
            ranks=None if result.times is None else spread(result.times),
        )
        journal.step(job.state.last_step)


def name_slow_ranks(job: Job, times: Times, num_steps: int) -> None:
    """Tell the user which ranks have become slow, or are so no longer, by what all have told of so many steps."""
    found = job.slow_ranks.hear(times, num_steps)
    for one in found[:MOST_NAMED]:
        host = job.hosts[one.rank]
        facts = {"rank": one.rank, "host": host, "cause": one.cause, "factor": round(one.factor, 3)}
        step, recovered = job.state.progress.step, one.cause is None
        job.output.journal.event("slow", one.describe(host), step=step, recovered=recovered, **facts)
    if len(found) > MOST_NAMED:
        more = f"the same holds for {len(found) - MOST_NAMED} more ranks"
        job.output.journal.event("note", more, step=job.state.progress.step)


def deal_by_speed(job: Job, times: Times, num_steps: int) -> None:
    """Have the slots dealt otherwise from the next step on, where what all have told of their times is worth it."""
    num_slots = job.state.cut.num_slots(job.state.cut.global_batch)
    if not job.balance.hear(times, num_steps, num_slots):
        return
    slots = job.balance.slots_of(num_slots, job.world.place.size)
    least, most = (
        f"rank {slots.index(count)} on {job.hosts[slots.index(count)]}" for count in (min(slots), max(slots))
    )
    job.output.journal.event(
        "balance",
        f"the {num_slots} slots of a step are dealt by speed: {most} has {max(slots)} of them, {least} {min(slots)}",
        step=job.state.progress.step,
        slots=slots,
    )


def give_up(job: Job, result: StepResult) -> None:
    """Commit the weights, which no skipped step has changed, and raise Diverged with what all ranks know."""
    state = job.state
    saved = result_of_rank_0(job.world, job.output.store.commit_last(state))
    num_samples = job.parts.train_loader.num_samples
    of_ranks = job.world.gather([int(sample) % num_samples for sample in result.not_finite])
    samples = [f"rank {rank}: samples {first_few(found, 8)}" for rank, found in enumerate(of_ranks) if found]
    cause = f"the loss is not finite ({'; '.join(samples)})" if samples else "the loss is finite, but not its gradient"
    kept = "committed" if saved else "NOT committed (see above)"
    progress = state.progress
    raise Diverged(
        f"{progress.skipped_in_row} steps in a row were skipped; in the last one, step {progress.step}, {cause}; "
        f"the weights are those before them, and {kept}; try a smaller --learning-rate or --clip-norm"
    )


def evaluated(job: Job) -> Scores | None:
    """Return the scores on the validation set at the end of an epoch, if there is one and it is time to."""
    number, config = job.state.progress.epoch + 1, job.config
    due = number % config.run.eval_epochs == 0 or number == config.schedule.epochs
    if job.parts.val_loader is None or not due:
        return None
    return validate(job, job.parts.val_loader, job.state.result)


def finish_epoch(job: Job, scores: Scores | None) -> None:
    """Keep the best weights, write the epoch down and move to the next one."""
    state, config = job.state, job.config
    number = state.progress.epoch + 1
    if scores is not None:
        figure = deciding(config.schedule, job.parts.meter.task)
        is_best = state.best is None or figure.is_better(scores[figure.name], state.best.scores[figure.name])
        if is_best:
            verify(job)  # should a rank be lost in it, nothing has changed yet
        state.last = Evaluation(number, scores.values)
        if is_best:
            state.best = state.last
            job.output.store.save_weights(checkpoint.BEST, state)
    of_evaluation = {
        f"val_{figure.name}": scores[figure.name] if scores else None for figure in job.parts.meter.task.all_figures
    }
    state.spent = state.spent.more(job.clocks.lap.take())
    state.last_epoch = EpochRecord(
        epoch=number,
        step=state.progress.step,
        seconds=state.spent.epoch,
        usage=usage(job.parts.device),
        scores={**job.parts.meter.figures(state.totals), **of_evaluation},
        images_per_second=job.clocks.stopwatch.images_per_second,
    )
    job.output.journal.epoch(state.last_epoch)
    state.progress, state.totals = state.progress.next_epoch(), Totals()
    state.spent = replace(state.spent, epoch=0.0)


def validate(job: Job, loader: Loader, model: nn.Module, meter: Meter | None = None) -> Scores:
    """Return the scores of a model on all samples of a loader, the same on every rank, by the task or this meter."""
    with job.clocks.stopwatch.paused():
        scores = evaluate(
            model,
            loader,
            job.world,
            micro_batch=job.config.batch.eval_batch_size,
            meter=meter or job.parts.meter,
            device=job.parts.device,
            autocast=autocast(job.config.precision.precision, job.parts.device),
            share=job.share,
            most_passes=TRIAL_PASSES if job.config.schedule.trial else None,
        )
    job.clocks.split.restart()
    return scores
