"""Which parameters are trained, as a function of the epoch: the others take no part in a step, nor in its reduction."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hvd_train.errors import UsageError
from hvd_train.network.models import head_of
from hvd_train.settings.model import ModelConfig

_UNFREEZE = re.compile(r"(\d+):(.+)")


def check(config: ModelConfig) -> None:
    """Raise UsageError for what cannot be read as EPOCH:PATTERN, or thaws what was never frozen."""
    for entry in config.unfreeze:
        if not _UNFREEZE.fullmatch(entry):
            raise UsageError(f"--unfreeze {entry}: write it as EPOCH:PATTERN, as in --unfreeze 5:layer4.* 10:*")
    if config.unfreeze and config.freeze == "none":
        raise UsageError("--unfreeze without --freeze: nothing is frozen")


def frozen(config: ModelConfig, model: nn.Module, epoch: int) -> set[str]:
    """Names of the parameters that are frozen in an epoch (counted from 0).

    Raises UsageError where a pattern is the name of nothing, or nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    if config.freeze == "none":
        return set()
    if config.freeze == "backbone":
        head = head_of(model)
        if head is None:
            raise UsageError("--freeze backbone: the model has no linear or convolutional layer to leave out")
        result = {name for name in names if not name.startswith(f"{head}.")}
    else:
        result = _matching(config.freeze, names)
    thawing = [match.groups() for entry in config.unfreeze if (match := _UNFREEZE.fullmatch(entry))]
    for start, pattern in thawing:
        found = _matching(pattern, names)
        if epoch >= int(start):
            result -= found
    if len(result) == len(names):
        raise UsageError(f"--freeze {config.freeze} freezes every parameter of the model")
    return result


def apply(config: ModelConfig, model: nn.Module, epoch: int) -> bool:
    """Freeze and thaw for an epoch (counted from 0); whether anything is trained that was not, or the reverse.

    Batch norm whose own parameters are frozen stays in evaluation mode: its statistics belong to those weights. With
    `freeze` none the model itself has said what is trained.
    """
    if config.freeze == "none":
        return False
    names = frozen(config, model, epoch)
    changed = False
    for name, parameter in model.named_parameters():
        changed |= parameter.requires_grad == (name in names)
        parameter.requires_grad_(name not in names)
        if name in names:
            parameter.grad = None
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if isinstance(module, _BatchNorm) and own and model.training:
            module.train(any(parameter.requires_grad for parameter in own))
    return changed


def prepare(config: ModelConfig, model: nn.Module) -> None:
    """Before an optimizer is made: what is trained in some epoch requires a gradient, the rest does not."""
    if config.freeze == "none":
        return
    trained = ever_trained(config, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)


def ever_trained(config: ModelConfig, model: nn.Module) -> set[str]:
    """Names of the parameters that are trained in some epoch."""
    names = {name for name, _ in model.named_parameters()}
    last = max((int(entry.partition(":")[0]) for entry in config.unfreeze), default=0)
    return names - frozen(config, model, last)


def _matching(pattern: str, names: Iterable[str]) -> set[str]:
    found = {name for name in names if fnmatchcase(name, pattern)}
    if not found:
        raise UsageError(
            f"no parameter of the model is called {pattern}; they are called {', '.join(list(names)[:4])}, ..."
        )
    return found
