"""Freeze parameters as a function of the epoch.

Frozen parameters have no gradient and are not reduced.
"""

import math
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hvd_train.config import ModelConfig
from hvd_train.errors import UsageError, first_few


def check(config: ModelConfig) -> None:
    """Raise UsageError if `--unfreeze` is malformed or lacks `--freeze`."""
    for entry in config.unfreeze:
        if not re.fullmatch(r"\d+:.+", entry):
            raise UsageError(
                f"--unfreeze {entry}: write it as EPOCH:PATTERN, as in --unfreeze 5:layer4.* 10:*"
            )
    if config.unfreeze and config.freeze == "none":
        raise UsageError("--unfreeze without --freeze: nothing is frozen")


def frozen(config: ModelConfig, model: nn.Module, epoch: float, heads: Sequence[str]) -> set[str]:
    """Return the names of frozen parameters in `epoch` (from 0).

    Raises UsageError if all are, or nothing matches.
    """
    names = [name for name, _ in model.named_parameters()]
    if config.freeze == "backbone":
        if not heads:
            raise UsageError(
                "--freeze backbone: the model has no linear or convolutional layer to leave out"
            )
        of_heads = {each for head in heads for each in model.get_submodule(head).parameters()}
        frozen_names = {
            name for name, parameter in model.named_parameters() if parameter not in of_heads
        }
    else:
        frozen_names = _matching(config.freeze, names)
    for first_epoch, _, pattern in (entry.partition(":") for entry in config.unfreeze):
        # before its epoch, too: a pattern without a match is an error at once
        thawed = _matching(pattern, names)
        if epoch >= int(first_epoch):
            frozen_names -= thawed
    if len(frozen_names) == len(names):
        raise UsageError(f"--freeze {config.freeze} freezes every parameter of the model")
    return frozen_names


def described(config: ModelConfig, model: nn.Module, heads: Sequence[str]) -> list[str]:
    """Return a line that says what is trained in the first epoch, if anything is frozen.

    Raises UsageError.
    """
    if config.freeze == "none":
        return []
    names = frozen(config, model, 0, heads)
    trained = [name for name, _ in model.named_parameters() if name not in names]
    at_first = " at first" if config.unfreeze else ""
    count = f"{len(trained)} of {len(names) + len(trained)} parameters"
    return [f"--freeze {config.freeze} trains {count}{at_first}: {first_few(trained, 8)}"]


def apply(
    config: ModelConfig, model: nn.Module, epoch: float = math.inf, heads: Sequence[str] = ()
) -> None:
    """Freeze and thaw parameters for `epoch` (from 0; default: the last).

    Raises UsageError as `frozen`.

    `heads` are the layers that `--freeze backbone` leaves out.
    """
    if config.freeze == "none":
        return
    names = frozen(config, model, epoch, heads)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in names)
        if name in names:
            parameter.grad = None
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        # its statistics belong to its parameters
        if isinstance(module, _BatchNorm) and own and model.training:
            module.train(any(parameter.requires_grad for parameter in own))


def _matching(pattern: str, names: Iterable[str]) -> set[str]:
    matching = {name for name in names if fnmatchcase(name, pattern)}
    if not matching:
        raise UsageError(
            f"no parameter of the model is called {pattern}; they are called "
            f"{first_few(list(names))}"
        )
    return matching
