"""Optimizers that a config names by class or function: torch's others and the user's own, tried before they serve."""

from __future__ import annotations

import inspect
import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_train import plugin
from hvd_train.errors import UsageError
from hvd_train.settings.arguments import arguments_in
from hvd_train.settings.optimizer import OptimizerConfig

T = TypeVar("T", bound=Optimizer)
Named = Sequence[tuple[str, nn.Parameter]]
Groups = Sequence[Mapping[str, Any]]

LR_RATIO = "lr_ratio"
"""In a group of a user's function: its own learning rate over --learning-rate."""
_FLAGS = {"lr": "--learning-rate", "weight_decay": "--weight-decay", "momentum": "--momentum", "nesterov": "--nesterov"}


def check(config: OptimizerConfig) -> None:
    """Raise UsageError where the class or function that the config names cannot serve, as far as that can be known.

    Only a function has to wait for the model, whose parameters it may know by their names.
    """
    maker = _load(config)
    settings(config, maker)
    if isinstance(maker, type):
        weight = nn.Parameter(torch.ones(2, 2))
        build(config, [("weight", weight)], [{"params": [weight]}])


def build(config: OptimizerConfig, named: Named, groups: Groups) -> Optimizer:
    """Return the optimizer that the config names, of `groups` for a class and of `named` parameters for a function.

    Raises UsageError where it cannot be made, or where a step on small stand-ins for the parameters shows that it
    cannot serve.
    """
    maker = _load(config)
    _try(config, maker, named, groups)
    return _made(config, maker, named, groups)


def settings(config: OptimizerConfig, maker: Callable[..., Any], fixed: Sequence[str] = ()) -> dict[str, Any]:
    """Return what the maker of an optimizer is given beside the parameters: --optimizer-args, and what has a flag.

    A class or function is given the learning rate and the weight decay if it takes them, and where it takes any
    argument the learning rate, and a weight decay that is not 0; `fixed` are settings that a built-in optimizer has
    from flags. Raises UsageError for arguments that it does not take, or that have a flag, and for flags that
    would have no effect.
    """
    name, arguments = config.optimizer, arguments_in("optimizer-args", config.optimizer_args)
    try:
        parameters = list(inspect.signature(maker).parameters.values())[1:]  # the first one takes the parameters
    except ValueError as error:
        raise UsageError(f"--optimizer {name}: {error}") from None
    takes = [parameter.name for parameter in parameters if parameter.kind not in _REST]
    is_class, takes_more = isinstance(maker, type), any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    given = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    for_any = ("lr", "weight_decay" if config.weight_decay else "lr") if takes_more else ()
    given = {setting: value for setting, value in given.items() if setting in (*takes, *for_any)}
    for argument in arguments:
        if argument in given or argument in fixed:
            raise UsageError(f"--optimizer-args {argument}: it has a flag of its own: type {_FLAGS[argument]}")
        if argument not in takes and not takes_more:
            others = ", ".join(other for other in takes if other not in given and other not in fixed) or "nothing more"
            raise UsageError(f"--optimizer-args {argument}: {name} does not take it; it takes {others}")
    lacking = [p.name for p in parameters if p.kind not in _REST and p.default is inspect.Parameter.empty]
    for argument in lacking:
        if argument not in given and argument not in arguments:
            raise UsageError(f"--optimizer {name} needs {argument}: type --optimizer-args {argument}=...")
    if is_class and "lr" not in given:
        raise UsageError(f"--optimizer {name}: it takes no lr, the learning rate that the schedule sets")
    if is_class and config.weight_decay and "weight_decay" not in given:
        raise UsageError(f"--optimizer {name} knows no weight decay: type --weight-decay 0")
    if not is_class and config.weight_decay and "weight_decay" not in given:
        what = f"--optimizer {name} takes no weight_decay, which is {config.weight_decay:g}"
        raise UsageError(f"{what}: let it take one, or type --weight-decay 0")
    if not is_class and config.weight_decay and config.decay_of != "all":
        what = f"--decay-of {config.decay_of} has no effect on --optimizer {name}, which makes its groups itself"
        raise UsageError(f"{what}: type --decay-of all")
    return {**given, **arguments}


def never_compiled(cls: type[T]) -> type[T]:
    """Return an optimizer class of torch's without the wrappers against torch.compile around its methods.

    Each wrapper imports the whole compiler when it is first called, which takes longer than importing torch itself.
    Optimizers are not compiled here.
    """
    names = ("add_param_group", "load_state_dict", "state_dict", "step", "zero_grad")
    methods = {name: inspect.unwrap(getattr(cls, name)) for name in names}
    methods["step"] = torch.no_grad()(methods["step"])  # as one of these wrappers does
    return type(cls.__name__, (cls,), methods)


_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _load(config: OptimizerConfig) -> Callable[..., Any]:
    maker: Callable[..., Any] = plugin.load("optimizer", config.optimizer)
    if isinstance(maker, type):
        if not issubclass(maker, Optimizer):
            raise UsageError(f"--optimizer {config.optimizer}: it is no torch.optim.Optimizer, and no function")
        _check_step(config, maker)
        if maker.__module__.startswith("torch.optim."):
            return never_compiled(maker)
    return maker


def _check_step(config: OptimizerConfig, cls: type[Optimizer]) -> None:
    """Raise UsageError where a step of the class needs an argument, as that of LBFGS does."""
    _, *others = inspect.signature(cls.step).parameters.values()
    for parameter in others:
        if parameter.default is inspect.Parameter.empty and parameter.kind not in _REST:
            raise UsageError(
                f"--optimizer {config.optimizer}: its step needs a {parameter.name}; a step here is one gradient, "
                "which all ranks have summed, and takes no argument"
            )


def _made(config: OptimizerConfig, maker: Callable[..., Any], named: Named, groups: Groups) -> Optimizer:
    """Return what a class makes of `groups`, or a function of `named`. Raises UsageError where that cannot serve."""
    is_class, reference = isinstance(maker, type), config.optimizer
    arguments = settings(config, maker)
    try:
        made = maker([dict(group) for group in groups] if is_class else list(named), **arguments)
    except Exception as error:  # whatever the user's code raises
        raise UsageError(f"--optimizer {reference}: it cannot be made: {plugin.first_line(error)}") from error
    if not isinstance(made, Optimizer):
        raise UsageError(f"--optimizer {reference}: it returned {type(made).__name__}, not a torch.optim.Optimizer")
    _check_step(config, type(made))
    has = {id(parameter) for group in made.param_groups for parameter in group["params"]}
    numbers = {id(parameter): number for number, (_, parameter) in enumerate(named)}
    left_out = [name for name, parameter in named if id(parameter) not in has]
    if left_out or len(has) != len(named):
        what = f"lacks {', '.join(left_out[:3])}" if left_out else "has parameters that are not the model's"
        raise UsageError(
            f"--optimizer {reference}: it {what}; it must have each parameter that it is given (--freeze NAMES says "
            "what is not trained)"
        )
    for group in made.param_groups:
        # States are saved by their place, and a set of parameters has another order in each process.
        group["params"] = sorted(group["params"], key=lambda parameter: numbers[id(parameter)])
        if "param_names" in group:
            group["param_names"] = [named[numbers[id(parameter)]][0] for parameter in group["params"]]
        try:
            group["lr"] = float(group["lr"])  # a number of numpy's would go into checkpoints
        except (KeyError, TypeError, ValueError):
            what = f"--optimizer {reference}: a group of parameters has no lr, which the schedule scales"
            raise UsageError(what) from None
        if not is_class:
            group[LR_RATIO] = group["lr"] / config.learning_rate
    return made


def _try(config: OptimizerConfig, maker: Callable[..., Any], named: Named, groups: Groups) -> None:
    """Take steps on small stand-ins for the parameters, and go on from the state that a checkpoint would hold.

    Raises UsageError where a step fails or does not go by the learning rate of its group, the state cannot be written
    or read, or the steps after it are other ones.
    """

    def made() -> tuple[Optimizer, list[nn.Parameter]]:
        small = {id(parameter): _stand_in(parameter, number) for number, (_, parameter) in enumerate(named)}
        of_groups = [{**group, "params": [small[id(parameter)] for parameter in group["params"]]} for group in groups]
        optimizer = _made(config, maker, [(name, small[id(parameter)]) for name, parameter in named], of_groups)
        return optimizer, list(small.values())

    def step(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad = parameter.detach().cos()
        try:
            optimizer.step()
        except Exception as error:  # whatever the user's code raises
            raise UsageError(f"--optimizer {config.optimizer}: its step fails: {plugin.first_line(error)}") from error

    (first, parameters), (second, others) = made(), made()
    step(first, parameters)
    step(first, parameters)
    saved = _saved(config, first)
    try:
        second.load_state_dict(saved)
    except Exception as error:  # whatever the user's code raises
        raise UsageError(f"--optimizer {config.optimizer}: it loads no state: {plugin.first_line(error)}") from error
    with torch.no_grad():
        for other, parameter in zip(others, parameters, strict=True):
            other.copy_(parameter)
    step(first, parameters)
    step(second, others)
    if not all(map(torch.equal, parameters, others)):
        raise UsageError(
            f"--optimizer {config.optimizer}: its steps depend on more than gradients and what is in its state_dict "
            "(random numbers, attributes), so that ranks and resumed runs would come apart"
        )
    for optimizer, learning_rate in ((first, 1.0), (second, 0.5)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
    step(first, parameters)
    step(second, others)
    if all(map(torch.equal, parameters, others)):
        raise UsageError(
            f"--optimizer {config.optimizer}: its step does not go by the lr of its groups, which the schedule sets"
        )


def _stand_in(parameter: nn.Parameter, number: int) -> nn.Parameter:
    """Return a parameter of as many dimensions, with two numbers in each at most; no two of one shape are equal."""
    shape = [min(2, size) for size in parameter.shape]
    count = math.prod(shape)
    values = torch.arange(1, count + 1, device=parameter.device) / (count + 1 + number)
    return nn.Parameter(values.view(shape).to(parameter.dtype))


def _saved(config: OptimizerConfig, optimizer: Optimizer) -> dict[str, Any]:
    """Return the state_dict of an optimizer as it comes back from a checkpoint.

    Raises UsageError where it fails, holds what is no number, text or tensor, or belongs to no parameter.
    """
    reference = config.optimizer
    try:
        state = optimizer.state_dict()
    except Exception as error:  # whatever the user's code raises
        raise UsageError(f"--optimizer {reference}: its state_dict fails: {plugin.first_line(error)}") from error
    names = list(state) if isinstance(state, Mapping) else []
    if set(names) != {"state", "param_groups"}:
        has = ", ".join(map(str, names)) or "nothing"
        raise UsageError(f"--optimizer {reference}: its state_dict has {has}; it must have state and param_groups")
    for key, values in state["state"].items():
        if not (isinstance(key, int) and isinstance(values, Mapping)):
            raise UsageError(f"--optimizer {reference}: its state {key!r} belongs to no parameter")
    for place in ("state", "param_groups"):
        if (found := _not_plain(state[place])) is not None:
            raise UsageError(
                f"--optimizer {reference}: its {place} holds a {type(found).__name__}; a checkpoint holds Python's "
                "numbers, texts, tensors, and lists and dictionaries of them"
            )
    file = io.BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        saved: dict[str, Any] = torch.load(file, weights_only=True)
    except Exception as error:  # pickle raises many
        raise UsageError(
            f"--optimizer {reference}: no checkpoint holds its state: {plugin.first_line(error)}"
        ) from error
    return saved


def _not_plain(value: Any) -> object | None:
    """Return the first thing in nested values that is no number, text or tensor, or None.

    A number of numpy's is one of Python's, too, but is not written as one.
    """
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple)):
        return next((found for item in value if (found := _not_plain(item)) is not None), None)
    return None if isinstance(value, Tensor) or type(value) in (bool, int, float, str, type(None)) else value
