"""`--resume FILE`: start this run, with its own settings, from the checkpoint of another one."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from hvd_train import config_file
from hvd_train.config import Config
from hvd_train.errors import UsageError
from hvd_train.network import optim
from hvd_train.plugin import is_reference
from hvd_train.progress.order import BatchLayout
from hvd_train.state import Progress, Snapshot, TrainState, check_same_shapes

# They decide which samples are left in the epoch, how images are normalised, and which parameters are trained.
_FIXED = ("seed", "data", "repeated_augmentation", "weights", "freeze", "unfreeze")
_OF_CUT = ("batch_size", "global_batch_size", "accumulation_steps", "on_resize")


def adapted(
    snapshot: Snapshot, state: TrainState, config: Config, first_layout: Callable[[], BatchLayout]
) -> tuple[Snapshot, list[str]]:
    """Adapt the snapshot in the file `config.run.resume` to `state`; return it and notes about what differs.

    Raises UsageError for another model and for settings that cannot change, and as `first_layout()` does.
    """
    file = config.run.resume
    old = config_file.from_dict(snapshot["config"], source=file)
    _check(config, old, Progress(**snapshot["progress"]))
    check_same_shapes(state.model.state_dict(), snapshot["model"])
    mine, theirs = config.settings(), old.settings()
    notes, changed = list[str](), dict[str, Any](best=None)
    if differences := config.differences(old):
        notes.append(f"other settings than in {file} hold from here on: {'; '.join(differences)}")
    if any(mine[name] != theirs[name] for name in _OF_CUT):
        changed["layout"] = dataclasses.asdict(first_layout())

    changed["optimizer"] = optim.adapted(snapshot["optimizer"], old.optimizer, state.optimizer, state.model)
    if mine["optimizer"] != theirs["optimizer"] or changed["optimizer"] is None:
        changed["optimizer"] = state.optimizer.state_dict()
        notes.append(f"--optimizer {mine['optimizer']} starts with fresh state: {file} is of another optimizer")

    if state.average is not None and snapshot["average"] is None:
        weights = {f"module.{name}": value for name, value in snapshot["model"].items()}
        changed["average"] = {"n_averaged": torch.tensor(1), **weights}
        changed["buffers"] = snapshot["buffers"][:1] * 2  # the model's, for the average as well
        notes.append(f"the moving average starts from the weights in {file}")
    if best := snapshot["best"]:
        score = f"top-1 {best['top1']:.2%} in epoch {best['epoch']}"
        notes.append(f"the best weights so far ({score}) are not in {file}: this run keeps its own best")
    return {**snapshot, **changed}, notes


def _check(config: Config, old: Config, progress: Progress) -> None:
    """Raise UsageError for settings that cannot change within a training."""
    file, mine, theirs = config.run.resume, config.settings(), old.settings()
    fixed = {name: theirs[name] for name in _FIXED if mine[name] != theirs[name]}
    if all(map(is_reference, (mine["data"], theirs["data"]))):
        fixed.pop("data", None)  # a function may have moved to another file
    if fixed:
        values = {name: value if isinstance(value, tuple) else (value,) for name, value in fixed.items()}
        flags = [" ".join([f"--{name.replace('_', '-')}", *map(str, value)]) for name, value in values.items()]
        raise UsageError(
            f"--resume {file}: its run cannot continue with other samples or other trained parameters: type "
            f"{' '.join(flags)}, or start a new run from weights: --weights FILE in place of --resume"
        )
    begun = progress.epoch + bool(progress.cursor)
    if begun > (epochs := config.schedule.epochs):
        raise UsageError(f"--epochs {epochs}: {file} is of epoch {begun}: type --epochs {begun} or more")
