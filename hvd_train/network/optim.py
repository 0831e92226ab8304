"""The optimizer that a config names, and the moving average of weights."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from typing_extensions import override

from hvd_train import plugin
from hvd_train.errors import UsageError
from hvd_train.network import buffers, own_optimizer
from hvd_train.network.own_optimizer import LR_RATIO, never_compiled
from hvd_train.settings.optimizer import OPTIMIZERS, OptimizerConfig
from hvd_train.world.wire import has_no_gaps

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def build(config: OptimizerConfig, model: nn.Module) -> Optimizer:
    """Return the optimizer of the parameters of `model` that require a gradient.

    Raises UsageError where there is none, where LARS or LAMB is asked for and timm is not installed, and where an
    optimizer cannot serve or does not take what it is given.
    """
    groups = parameter_groups(config, model)
    if not groups:
        raise UsageError("the model has no parameter to train")
    if plugin.is_reference(config.optimizer):
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        return own_optimizer.build(config, named, groups)
    cls = _class(config)
    given = own_optimizer.settings(config, cls, _FROM_FLAGS[config.optimizer])
    given |= {name: getattr(config, name) for name in _FROM_FLAGS[config.optimizer]}
    if config.optimizer not in _OF_TIMM:
        # Fused: one pass over memory, where torch's default takes one for each term of the formula.
        dense = all(_is_dense_and_real(parameter) for group in groups for parameter in group["params"])
        given = {"fused": dense and not given.get("dampening"), **given}
    try:
        built = cls(groups, **given)
    except (TypeError, ValueError, RuntimeError) as error:
        if not config.optimizer_args:
            raise
        raise UsageError(f"--optimizer-args {' '.join(config.optimizer_args)}: {error}") from error
    if config.optimizer == "sgd" and config.momentum and not given.get("dampening"):
        _give_momenta(built)
    return built


def check(config: OptimizerConfig) -> None:
    """Raise UsageError for what can be known to be wrong with the optimizer before there is a model."""
    if plugin.is_reference(config.optimizer):
        own_optimizer.check(config)
    elif config.optimizer_args:
        build(config, nn.Linear(2, 2))


_OF_TIMM = ("lars", "lamb")
_FROM_FLAGS = {name: ("momentum", "nesterov") if name in ("sgd", "lars") else () for name in OPTIMIZERS}
"""The settings of each optimizer that have flags, beside the learning rate and the weight decay that all have."""


def _class(config: OptimizerConfig) -> type[Optimizer]:
    """Return the class of a built-in optimizer. Raises UsageError where LARS or LAMB is named without timm.

    LARS: You, Gitman and Ginsburg, arXiv 1708.03888. LAMB: You et al., arXiv 1904.00962.
    """
    if config.optimizer in _OF_TIMM:
        try:
            from timm.optim.lamb import Lamb
            from timm.optim.lars import Lars
        except ImportError:
            raise UsageError(f"--optimizer {config.optimizer}: timm is not installed: pip install timm") from None
        return Lars if config.optimizer == "lars" else Lamb
    classes: dict[str, type[Optimizer]] = {
        "sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW,
    }  # fmt: skip
    return never_compiled(classes[config.optimizer])


def _give_momenta(sgd: Optimizer) -> None:
    """Give SGD momenta of zero, of which the first step makes the gradient, as it does without momenta.

    Without them torch's fused SGD (2.15) fails where a thawed parameter has its first step later than others.
    """
    for group in sgd.param_groups:
        for parameter in group["params"]:
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _is_dense_and_real(parameter: Tensor) -> bool:
    """Return whether a parameter has real numbers without gaps in memory: torch's fused optimizers take no other."""
    return parameter.is_floating_point() and has_no_gaps(parameter)


def match_memory_format(optimizer: Optimizer) -> None:
    """Give each state tensor of `optimizer` the order in memory that its parameter has.

    A checkpoint may come from a run with another order (`--channels-last`). torch's fused optimizers (2.15) take
    numbers as they lie in memory, and would pair each weight with the momentum of another one.
    """
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def parameter_groups(config: OptimizerConfig, model: nn.Module) -> list[dict[str, Any]]:
    """Return the groups of parameters that require a gradient, with `weight_decay` 0 for those that are exempt.

    With `--decay-of weights` biases and the parameters of normalisation layers are exempt. Empty groups are left out.
    """
    norm_parameters = {id(p) for m in model.modules() if isinstance(m, _NORMS) for p in m.parameters(recurse=False)}
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_weight = id(parameter) not in norm_parameters and name.rpartition(".")[2] != "bias"
            decays = config.decay_of != "weights" or is_weight
            (decaying if decays else others).append(parameter)
    groups: list[dict[str, Any]] = [{"params": decaying}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


class MovingAverage(AveragedModel):
    """The exponential moving average of a model's weights and of those of its buffers that have a mean over slots.

    Its other buffers are those of the model: the mean of two random states or unit vectors is neither.
    """

    def __init__(self, model: nn.Module, decay: float, averaged: Set[str]) -> None:
        super().__init__(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)  # type: ignore[no-untyped-call]
        self._averaged = averaged

    @override
    def update_parameters(self, model: nn.Module) -> None:
        """Take in the model's values of now; the first time they are copied."""
        super().update_parameters(model)
        buffers.copy_others(model, self.module, self._averaged)


def moving_average(config: OptimizerConfig, model: nn.Module, patterns: Sequence[str] = ()) -> MovingAverage | None:
    """Return the exponential moving average of `model`, or None without `--ema-decay`.

    Its first update copies the model. The buffers that are averaged over slots (`buffers.averaged`, with these
    `patterns`) are averaged here, too, as in torchvision's training references, so that running statistics belong to
    the weights.
    """
    averaged = buffers.averaged(model, patterns)
    return None if config.ema_decay is None else MovingAverage(model, config.ema_decay, averaged)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether each element of a weight is updated from its own gradient and state alone, in any order.

    LARS and LAMB, which scale by norms of whole weights, are not; optimizers that are not known count as they, and so
    do classes that users have derived from those that are. With dampening, momenta of zero are not as good as none.
    """
    around = ("hvd_train", "horovod")  # classes around the one that was asked for
    kind = next(cls for cls in type(optimizer).__mro__ if cls.__module__.partition(".")[0] not in around)
    dampened = any(group.get("dampening") for group in optimizer.param_groups)
    return kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW) and not dampened


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> float:
    """Set the learning rate of the next step, and return that of the first group.

    It is that of all parameters, but where a user's function has given a group one of its own: that one is scaled by
    as much as `learning_rate` differs from --learning-rate.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get(LR_RATIO, 1.0)
    first: float = optimizer.param_groups[0]["lr"]
    return first
