"""When a training ends, and which evaluation is the best."""

import math

from hvd_train.config import Config
from hvd_train.settings.schedule import ScheduleConfig
from hvd_train.state import Evaluation, TrainState


def reason_to_end(config: Config, state: TrainState) -> str | None:
    """Return why the training ends, or None. It follows from the state, so no restart trains beyond it."""
    schedule, best, last, epoch = config.schedule, state.best, state.last, state.progress.epoch
    if epoch >= schedule.epochs:
        return "done"
    if last and schedule.target_accuracy and last.top1 >= schedule.target_accuracy:
        return f"target accuracy {schedule.target_accuracy:.2%} reached"
    if best and schedule.patience and epoch - best.epoch >= schedule.patience:
        return f"nothing better since epoch {best.epoch}"
    return None


def better(schedule: ScheduleConfig, evaluation: Evaluation, best: Evaluation) -> bool:
    """Return whether an evaluation is better than the best one so far."""
    if schedule.best_by == "loss":
        return evaluation.loss < best.loss or math.isnan(best.loss)
    return evaluation.top1 > best.top1
