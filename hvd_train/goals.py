"""When there is nothing more to train, and which evaluation is the best: functions of the config and the state."""

from __future__ import annotations

from hvd_train.config import Config
from hvd_train.errors import UsageError
from hvd_train.progress.figures import LOSS, Figure
from hvd_train.settings.schedule import ScheduleConfig
from hvd_train.state import Progress, TrainState
from hvd_train.tasks.meter import Meter
from hvd_train.tasks.task import Task


def reason_to_end(config: Config, task: Task, state: TrainState) -> str | None:
    """Return why there is nothing more to train, or None. No restart goes on beyond it: it follows from the state."""
    schedule, best, last, epoch = config.schedule, state.best, state.last, state.progress.epoch
    if epoch >= schedule.epochs:
        return "done"
    if last and schedule.aim:
        name, aim = schedule.aim
        figure = task.figure(name)
        if figure.reached(last.scores[name], aim):
            return f"target {'accuracy' if name == 'top1' else figure.title} {figure.written(aim)} reached"
    if out_of_steps(schedule, state.progress):
        return "its trial is over" if schedule.trial else f"its steps (--max-steps {schedule.max_steps}) are done"
    if schedule.total_seconds is not None and (state.spent.limit or 0.0) >= schedule.total_seconds:
        return f"its total time (--total-time {schedule.total_time}) is over"
    if best and schedule.patience and epoch - best.epoch >= schedule.patience:
        return f"nothing better since epoch {best.epoch}"
    return None


def out_of_steps(schedule: ScheduleConfig, progress: Progress) -> bool:
    """Return whether all steps are done that a run is to have, whatever epoch it is in."""
    return schedule.last_step is not None and progress.step >= schedule.last_step


def deciding(schedule: ScheduleConfig, task: Task) -> Figure:
    """Return the figure that says which evaluation is the best. Raises UsageError where the task has none of its name.

    An evaluation that is equal to the best one so far is not better.
    """
    if schedule.best_by == "auto":
        return task.figure(task.best)
    try:
        return task.figure(schedule.best_by)
    except UsageError as error:
        raise UsageError(f"--best-by {schedule.best_by}: {error}") from None


def check(schedule: ScheduleConfig, task: Task, *, can_evaluate: bool) -> None:
    """Raise UsageError for aims that no evaluation can reach: without a validation set, or of figures there are not."""
    if not can_evaluate and (schedule.aim or schedule.patience):
        raise UsageError("--target-accuracy, --target and --patience need a validation set; the data have none")
    deciding(schedule, task)
    if schedule.aim:
        name, _ = schedule.aim
        flag = "--target-accuracy" if schedule.target_accuracy else f"--target {schedule.target}"
        try:
            task.figure(name)
        except UsageError as error:
            raise UsageError(f"{flag}: {error}") from None


def check_measured(state: TrainState, meter: Meter) -> None:
    """Raise UsageError where a state that was loaded was measured by another task: its figures could not go on."""
    names = [figure.name for figure in meter.task.all_figures]
    scored = [evaluation for evaluation in (state.last, state.best) if evaluation is not None]
    others = next((evaluation for evaluation in scored if sorted(evaluation.scores) != sorted(names)), None)
    if others is not None or len(state.totals.sums) not in (0, meter.training.size):
        before = f"had the figures {', '.join(others.scores)}" if others else "measured something else"
        raise UsageError(
            f"the task of this run {before}, and has {', '.join(names)} now: go on with the task of before, or type "
            "--resume never"
        )


def headline(schedule: ScheduleConfig, task: Task) -> list[Figure]:
    """Return the figures that are shown where there is room for few: the loss, and the one that decides.

    Where that is the loss, the other one is the task's own choice.
    """
    figure = deciding(schedule, task)
    return list(dict.fromkeys([LOSS, task.figure(task.best) if figure.name == LOSS.name else figure]))
