"""The optimizer a config names, over the parameters that are trained."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hvd_train.errors import UsageError
from hvd_train.settings.optimizer import OptimizerConfig

T = TypeVar("T", bound=Optimizer)

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def build(config: OptimizerConfig, model: nn.Module) -> Optimizer:
    """The optimizer; its learning rate is set before each step by the loop. Raises UsageError with nothing to train."""
    groups = parameter_groups(config, model)
    if not groups:
        raise UsageError("the model has no parameter to train")
    common: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    if config.optimizer in ("lars", "lamb"):
        return _of_timm(config, groups, common)
    # One pass over memory, where torch's default takes one for each term of the formula.
    common["fused"] = all(_in_one_piece(parameter) for group in groups for parameter in group["params"])
    if config.optimizer == "sgd":
        return _sgd(config, groups, common)
    cls: type[torch.optim.Adam] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer]
    return _never_compiled(cls)(groups, **common)


def _sgd(config: OptimizerConfig, groups: list[dict[str, Any]], common: dict[str, Any]) -> Optimizer:
    """With momenta of zero, from which the first step makes the gradient, as from none at all.

    Without them torch's one pass breaks where a parameter has its first step later than others: when it is thawed
    (torch 2.15).
    """
    built = _never_compiled(torch.optim.SGD)(groups, momentum=config.momentum, nesterov=config.nesterov, **common)
    if config.momentum:
        for group in groups:
            for parameter in group["params"]:
                built.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return built


def _in_one_piece(parameter: Tensor) -> bool:
    """Whether it is made of real numbers with nothing between them in memory; torch's one pass takes no other."""
    return parameter.is_floating_point() and torch.empty_like(parameter).stride() == parameter.stride()


def lay_out(optimizer: Optimizer) -> None:
    """Give its tensors the order in memory that their parameters have.

    A checkpoint may come from a run with another one (`--channels-last`), and torch's one pass takes numbers as they
    lie in memory (2.15): it would pair each weight with the momentum of another.
    """
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _never_compiled(cls: type[T]) -> type[T]:
    """The class with its methods as they were written.

    Torch wraps them so that torch.compile leaves them alone, and each wrapper imports the whole compiler when it is
    called: more than torch itself takes, before the first step. Optimizers are not compiled here.
    """
    names = ("add_param_group", "load_state_dict", "state_dict", "step", "zero_grad")
    methods = {name: inspect.unwrap(getattr(cls, name)) for name in names}
    methods["step"] = torch.no_grad()(methods["step"])  # as one of its wrappers does
    return type(cls.__name__, (cls,), methods)


def parameter_groups(config: OptimizerConfig, model: nn.Module) -> list[dict[str, Any]]:
    """The parameters that are trained: one group, or those that decay and those that do not."""
    of_norms = {id(p) for m in model.modules() if isinstance(m, _NORMS) for p in m.parameters(recurse=False)}
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            exempt = config.decay_of == "weights" and (id(parameter) in of_norms or name.rpartition(".")[2] == "bias")
            (others if exempt else decaying).append(parameter)
    groups: list[dict[str, Any]] = [{"params": decaying}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _of_timm(config: OptimizerConfig, groups: list[dict[str, Any]], common: dict[str, Any]) -> Optimizer:
    """LARS (You, Gitman and Ginsburg, arXiv 1708.03888) or LAMB (You et al., arXiv 1904.00962)."""
    try:
        from timm.optim.lamb import Lamb
        from timm.optim.lars import Lars
    except ImportError:
        raise UsageError(f"--optimizer {config.optimizer} is timm's, which is not here: pip install timm") from None
    built: Optimizer
    if config.optimizer == "lars":
        built = Lars(groups, momentum=config.momentum, nesterov=config.nesterov, **common)
    else:
        built = Lamb(groups, **common)
    return built


def average(config: OptimizerConfig, model: nn.Module) -> AveragedModel | None:
    """The moving average of weights and running statistics, where one is kept; after the first step it is the model.

    As in torchvision's training references: averages of buffers too, so that statistics belong to the weights.
    """
    if config.ema_decay is None:
        return None
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(config.ema_decay), use_buffers=True)  # type: ignore[no-untyped-call]


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """The learning rate of the next step, for all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
