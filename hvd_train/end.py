"""Why a training ends, and what is written then."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from hvd_train import checkpoint
from hvd_train.console import say
from hvd_train.errors import (
    DataTimeout,
    Diverged,
    FaultRepeats,
    HvdTrainError,
    PassesDiffer,
    RankDiffers,
    RankLost,
    ReplicasDiffer,
    UsageError,
)
from hvd_train.launch import exit_report
from hvd_train.membership import Membership
from hvd_train.network import buffers, weights
from hvd_train.network.device import peak_memory_gib
from hvd_train.progress.stop import StopSignal
from hvd_train.replicas import confirm_equal
from hvd_train.result import Result, ending, summary
from hvd_train.state import Answer, TrainState, to_host
from hvd_train.tasks.task import Scores, targets_of
from hvd_train.updater import Attempt, advice_for
from hvd_train.world.world import result_of_rank_0

MOST_SKIPPED_STEPS = 10
"""In a row; then a run ends with an error."""


def time_is_up(ranks: Membership) -> bool:
    """Return whether the run has trained for as long as it may, in which all ranks agree."""
    limit = ranks.config.run.max_seconds
    return limit is not None and ranks.state.seconds >= limit


def reason_to_end(ranks: Membership) -> str | None:
    """Return why the training ends now, or None.

    It follows from the state, so no restart trains beyond it.
    """
    config = ranks.config
    state = ranks.state
    schedule = config.schedule
    best = state.best
    last = state.last
    epoch = state.progress.epoch
    if epoch >= schedule.epochs:
        return "done"
    if time_is_up(ranks):
        return f"--max-time {config.run.max_time} reached"
    for goal, value in targets_of(ranks.parts.task, schedule).items():
        if last and not goal.better(value, last.figures[goal.name]):
            return f"target {goal.name} {value:g} reached"
    if best and schedule.patience and epoch - best.epoch >= schedule.patience:
        return f"nothing better since epoch {best.epoch}"
    return None


def has_diverged(state: TrainState) -> bool:
    """Return whether too many steps in a row were skipped."""
    return state.progress.skipped_in_row >= MOST_SKIPPED_STEPS


def compare_states(ranks: Membership, what: str) -> None:
    """Compare the states of all ranks; the ledger gets their digest. Raises as `confirm_equal`."""
    if ranks.world.place.size == 1 and not ranks.config.run.ledger:
        return  # to digest the state of a GPU is one more copy of it
    digest = confirm_equal(ranks.state, ranks.world, what)
    entry = ranks.state.enter_digest(digest)
    if entry is not None:
        ranks.output.journal.took(entry)


def give_up(ranks: Membership, last: Answer) -> NoReturn:
    """Commit the weights, which skipped steps have not changed, and raise Diverged."""
    progress = ranks.state.progress
    compare_states(ranks, "a commit")
    saved = result_of_rank_0(ranks.world, ranks.output.commit_last(ranks.state, verified=True))
    finite = last.has_finite_loss
    cause = "the loss is finite, but not its gradient" if finite else "the loss is not finite"
    kept = "committed" if saved else "NOT committed (see above)"
    raise Diverged(
        f"{progress.skipped_in_row} steps in a row were skipped; in the last one, step "
        f"{progress.step}, {cause}; the weights are those before them, and {kept}; try a smaller "
        "--learning-rate or --clip-norm"
    )


def note_difference(ranks: Membership, error: PassesDiffer) -> None:
    """Note that ranks have computed a micro-batch differently, and take the step again.

    Raises the second time, since earlier steps may be wrong, too: ReplicasDiffer, which is
    RankDiffers on the wrong rank, if it is known. Commits after the last comparison go aside.
    """
    journal = ranks.output.journal
    who = " and ".join(f"rank {rank} on {ranks.members[rank].host}" for rank in error.ranks)
    text = f"{who} computed {error} differently"
    step = ranks.steps + 1
    if not error.is_again:
        journal.event("recheck", f"{text}: the step is taken again", step=step)
        return
    # without a step, which the resumed run would forget
    journal.event("recheck", f"{text} twice", in_step=step)
    if ranks.output.store is not None:
        ranks.output.store.distrust(ranks.state.trusted_step)
    text = (
        f"{text} twice: a machine computes wrongly, or passes depend on more than weights and "
        "samples (--recheck-steps 0); the same command resumes from the last commit that a "
        "comparison has confirmed"
    )
    is_wrong = [*error.ranks] == [ranks.world.place.rank]
    raise RankDiffers(text) if is_wrong else ReplicasDiffer(text)


def write_final_files(
    ranks: Membership, stop: StopSignal, *, finished: bool, why: str = ""
) -> Result:
    """Write the final files and return the result once they are on disk.

    If a rank is lost meanwhile, nothing is closed yet: the next world of an elastic job writes the
    files. Raises RankLost.
    """
    config = ranks.config
    state = ranks.state
    world = ranks.world
    output = ranks.output
    task = ranks.parts.task
    ranks.profile.drop("the training has ended")
    compare_states(ranks, "the end of its training")
    received, peaks = zip(
        *world.gather((stop.received, peak_memory_gib(ranks.parts.device))), strict=True
    )
    signals = [number for number in received if number is not None]
    saved = result_of_rank_0(
        world, output.commit_last(state, final_weights=finished, verified=True)
    )
    test = _test(ranks) if finished else None
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
        why=reason_to_end(ranks) or why,
        samples_per_second=ranks.clock.samples_per_second,
        world_size=world.place.size,
        seconds=ranks.clock.of_process,
        peak_memory_gib=round(max(peaks), 3),
    )
    if test is not None:
        output.journal.evaluation("test", test.figures, progress.step, shown=False)
    if finished and saved:  # a summary marks the run as finished
        saved = output.write_summary(summary(result, config))
        result = replace(result, saved=world.broadcast(saved, 0))
    output.journal.event("end", ending(result, task))
    if config.run.copy_to and not result_of_rank_0(world, output.copy_last()):
        result = replace(result, saved=False)
    return result


def _test(ranks: Membership) -> Scores | None:
    """Score the best weights on the test set, if any; the last ones if no best ones are on disk."""
    parts = ranks.parts
    run_dir = ranks.output.path or ranks.output.replays
    if parts.test_loader is None:
        return None
    best = ranks.world.broadcast(
        checkpoint.read_weights(run_dir / checkpoint.BEST) if run_dir else None, 0
    )
    model = ranks.state.result
    last = to_host(buffers.kept(model.state_dict()))
    if best is not None:
        weights.load(best, model)
    try:
        return ranks.evaluate(parts.task, parts.evaluation, parts.test_loader)
    finally:
        weights.load(last, model)


def report_end(ranks: Membership, result: Result) -> None:
    """Tell the driver of an elastic job that the training has ended, finished or stopped."""
    ranks.world.leave(failed=False)
    ranks.world.program.ended.append(result)
    exit_report.training_ended(result.exit_code, result.steps, is_last=not ranks.name)


def end_with(
    error: BaseException, ranks: Membership, stop: StopSignal, attempt: Attempt | None
) -> BaseException:
    """Commit what is done, tell the driver of an elastic job, and return the
    error that ends this process, maybe within an attempt at an update.
    """
    ranks.world.leave(failed=isinstance(error, Exception))
    if isinstance(error, RankLost):
        return _after_lost_rank(error, ranks)
    if isinstance(error, SystemExit):  # the job continues without this process, or ends
        _commit_at_end(ranks)
        return error if stop.received is None else SystemExit(128 + stop.received)
    if not isinstance(error, Exception):
        return error
    in_training = ranks.during == "training"
    if isinstance(error, (ValueError, RuntimeError)) and in_training:
        error = (advice_for(error, attempt.batch) if attempt else None) or error
    is_of_user = in_training and not isinstance(error, HvdTrainError)
    if (
        ranks.steps
        and (is_of_user or isinstance(error, (UsageError, FaultRepeats, DataTimeout)))
        and _commit_at_end(ranks)
    ):
        say(f"step {ranks.steps} is committed; the same command resumes from there")
    if isinstance(error, HvdTrainError) and ranks.members and not error.of_all_ranks:
        error.raised_by = ranks.world.place.rank
    exit_report.send(error, ranks.during, ranks.steps)
    return error


def _commit_at_end(ranks: Membership) -> bool:
    """Commit what this rank has, if it is whole; return whether it is on disk."""
    if not ranks.survives or ranks.output.path is None:
        return False
    if not ranks.history.is_whole:
        say(
            "weights have changed since the last step, so a commit now could not be resumed exactly"
        )
        return False
    try:
        is_alone = ranks.world.place.size == 1
        return ranks.output.commit_last(ranks.state, verified=is_alone).result()
    except UsageError as error:
        say(f"there is no commit now: {error}")
        return False


def _after_lost_rank(error: RankLost, ranks: Membership) -> RankLost:
    """Commit the last finished step, and return the error with the outcome."""
    if not ranks.survives:
        return error
    if ranks.output.path is None:
        kept = "done, and for rank 0 to commit; the same command resumes from the last commit"
    elif _commit_at_end(ranks):
        kept = "committed; the same command resumes from there"
    else:
        kept = "NOT committed (see above); the same command resumes from the last commit"
    return RankLost(
        f"another rank ended or cannot be reached ({error}); step {ranks.steps} is {kept}"
    )
