"""The training loop, the page to read first: `train`, then the functions that it calls."""

import math

from torch import nn

from hvd_train import checkpoint
from hvd_train.data.loader import Ahead, Loader
from hvd_train.errors import Diverged
from hvd_train.job import Job, WorldChanged, reason_to_end
from hvd_train.network import device, freeze, optim
from hvd_train.progress.metrics import Totals
from hvd_train.progress.order import assignments, learning_rate_factor, order_of, peak_learning_rate
from hvd_train.run_files.journal import EpochRecord, Moment, StepRecord
from hvd_train.run_files.ledger import Entry
from hvd_train.state import Evaluation
from hvd_train.tasks.measures import LOSS
from hvd_train.tasks.task import Scores
from hvd_train.updater import StepResult, Votes
from hvd_train.validate import evaluate
from hvd_train.world.world import result_of_rank_0


def train(job: Job) -> bool:
    """Train to the last epoch; return False if a rank asked to stop earlier.

    Raises:
        WorldChanged: on all ranks after the same step, if hosts came or went.
        Diverged: if many steps in a row have a loss or gradient that is not finite.
        RankLost: if another rank is lost; no step is half done.
    """
    config, world, state, parts, clocks = job.config, job.world, job.state, job.parts, job.clocks
    journal, store = job.output.journal, job.output.store
    num_samples = parts.train_loader.num_samples
    peak = peak_learning_rate(config.optimizer, state.layout.global_batch)
    journal.begin(config.schedule.epochs, num_samples, parts.task.sample, parts.task.best)
    journal.catch_up(state.recent, state.last_step, state.last_epoch)
    clocks.stopwatch.restart()
    clocks.split.restart()

    while not reason_to_end(job):
        # the parameters that are trained in this epoch
        epoch = state.progress.epoch
        if freeze.apply(config.model, state.model, epoch):
            world.regroup(state.optimizer)

        # this rank's samples of each remaining step of the epoch, as batches on its device
        order = order_of(config.seed, epoch, num_samples, config.data.repeated_augmentation)
        work = assignments(order, state.progress.cursor, state.layout, world.place.rank, world.place.size)
        batches = Ahead(parts.train_loader.load(epoch, work), clocks.split.mark)

        for batch in batches:
            # the learning rate in the middle of this batch, as a function of the samples seen
            middle = (state.progress.cursor + batch.size / 2) / num_samples
            learning_rate = peak * learning_rate_factor(config.schedule, epoch + middle)
            optim.set_learning_rate(state.optimizer, learning_rate)

            # one optimizer step of all ranks; while gradients are sent, the next batch is prepared
            log = (state.progress.step + 1) % config.run.log_steps == 0
            result = job.updater.take(state, batch, votes(job), batches.prepare)

            # count it, show it, log it
            state.count_step(result.totals, skipped=result.skipped)
            clocks.stopwatch.step(batch.size)
            if result.fingerprint is not None:
                account_for(job, result.totals.count, result.fingerprint)
            show_step(job, result, learning_rate, log=log)
            if state.progress.skipped_in_row >= config.precision.max_skipped_steps:
                give_up(job, result)

            # do what the ranks have agreed on
            if result.agreed.stop:
                return False
            if result.agreed.commit and store.commit(state):
                clocks.commit_timer.reset()
            if result.agreed.change:
                raise WorldChanged
            clocks.split.mark("other")
            job.profile.step_done(state.progress.step)

        # evaluate, keep the best weights, go to the next epoch
        with clocks.stopwatch.paused():
            finish_epoch(job)
        clocks.split.restart()
    return True


def votes(job: Job) -> Votes:
    """Return the votes of this rank for the end of the next step."""
    every = job.config.run.commit_steps
    by_steps = every is not None and (job.state.progress.step + 1) % every == 0
    got_signal = job.stop.received is not None
    request = job.world.requested(got_signal=got_signal)
    return Votes(
        stop=job.clocks.time_limit.due or request == "stop",
        commit=by_steps or job.clocks.commit_timer.due or (got_signal and request == "change"),
        change=request == "change",
    )


def account_for(job: Job, count: int, fingerprint: int) -> None:
    """Write the last `count` positions of the epoch and the step's fingerprint into the ledger.

    The fingerprint is summed with the gradients, so every rank that has finished a step has its entry.
    """
    state, num_samples = job.state, job.parts.train_loader.num_samples
    progress = state.progress
    positions = progress.cursor - count, progress.cursor
    step = Entry(progress.epoch, (progress.step, progress.step), job.world.place.size, positions, fingerprint)
    job.output.journal.took(state.took(step, num_samples))


def show_step(job: Job, result: StepResult, learning_rate: float, *, log: bool) -> None:
    """Show the last step and, with `log`, write it to the log."""
    journal, progress = job.output.journal, job.state.progress
    speed = job.clocks.stopwatch.samples_per_second
    journal.progress(Moment(progress.epoch, progress.cursor, progress.step, job.state.totals.means(), speed))
    if job.arrival is not None and progress.step == job.arrival.change.step + 1:
        journal.world(job.arrival.change, progress.step, job.arrival.seconds())
    if result.skipped and not math.isfinite(result.totals.sums[LOSS]):
        journal.event("skipped", f"step {progress.step} is skipped: its loss is not finite", step=progress.step)
    if log:
        job.state.last_step = StepRecord(
            epoch=progress.epoch + 1,
            step=progress.step,
            samples=progress.epoch * job.parts.train_loader.num_samples + progress.cursor,
            measures=result.totals.means(),
            learning_rate=learning_rate,
            gradient_norm=result.gradient_norm,
            loss_scale=job.state.scaler.get_scale() if job.state.scaler.is_enabled() else None,
            skipped_steps=progress.skipped,
            samples_per_second=speed,
            split=job.clocks.split.take(),
        )
        journal.step(job.state.last_step)


def give_up(job: Job, result: StepResult) -> None:
    """Commit the weights, which skipped steps have not changed, and raise Diverged."""
    state = job.state
    saved = result_of_rank_0(job.world, job.output.store.commit_last(state))
    finite = math.isfinite(result.totals.sums[LOSS])
    cause = "the loss is finite, but not its gradient" if finite else "the loss is not finite"
    kept = "committed" if saved else "NOT committed (see above)"
    progress = state.progress
    raise Diverged(
        f"{progress.skipped_in_row} steps in a row were skipped; in the last one, step {progress.step}, {cause}; "
        f"the weights are those before them, and {kept}; try a smaller --learning-rate or --clip-norm"
    )


def finish_epoch(job: Job) -> None:
    """Evaluate if it is due, keep the best weights, log the epoch and begin the next one."""
    state, config = job.state, job.config
    number = state.progress.epoch + 1
    due = number % config.run.eval_epochs == 0 or number == config.schedule.epochs
    scores = validate(job, job.parts.val_loader, state.result) if due and job.parts.val_loader else None
    if scores is not None:
        state.last, goal = Evaluation(number, scores.figures), job.parts.goal
        if state.best is None or goal.better(scores[goal.name], state.best.figures[goal.name]):
            state.best = state.last
            job.output.store.save_weights(checkpoint.BEST, state)
    state.last_epoch = EpochRecord(
        epoch=number,
        step=state.progress.step,
        measures=state.totals.means(),
        scores=scores.figures if scores else None,
        samples_per_second=job.clocks.stopwatch.samples_per_second,
    )
    job.output.journal.epoch(state.last_epoch)
    state.progress, state.totals = state.progress.next_epoch(), Totals()


def validate(job: Job, loader: Loader, model: nn.Module) -> Scores:
    """Return a model's scores on all samples of a loader, the same on every rank."""
    return evaluate(
        job.parts.task,
        job.parts.evaluation,
        model,
        loader,
        job.world,
        micro_batch=job.config.batch.eval_batch_size,
        device=job.parts.device,
        autocast=device.autocast(job.config, job.parts.device),
    )
