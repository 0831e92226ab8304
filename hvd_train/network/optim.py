"""Build the optimizer of a config, and the moving average of weights."""

import ast
import copy
import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from typing_extensions import override

from hvd_train import plugin
from hvd_train.config import OptimizerConfig
from hvd_train.data.trees import tensors_in
from hvd_train.errors import UsageError, counted, described, first_few, first_line
from hvd_train.network import buffers
from hvd_train.world.wire import has_no_gaps

T = TypeVar("T", bound=Optimizer)
_NEEDS_CLOSURE = re.compile(
    r"\n *(?:assert \(?closure\b|if (?:closure is None|not closure):\s*raise\b)"
)
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def build(config: OptimizerConfig, model: nn.Module) -> Optimizer:
    """Return the optimizer of the trainable parameters. Raises UsageError if there are none."""
    groups = parameter_groups(config, model)
    if not groups:
        raise UsageError("the model has no parameter to train")
    common: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    own = {
        name: _value(text)
        for name, _, text in (each.partition("=") for each in config.optimizer_args)
    }
    try:
        return _built(config, groups, {**common, **own})
    except (TypeError, ValueError) as error:
        raise UsageError(f"--optimizer {config.optimizer}: {error}") from None


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _built(
    config: OptimizerConfig, groups: list[dict[str, Any]], settings: dict[str, Any]
) -> Optimizer:
    name = config.optimizer
    if plugin.is_reference(name):
        return _own(name, groups, settings)
    if name in ("sgd", "lars"):
        settings = {"momentum": config.momentum, "nesterov": config.nesterov, **settings}
    if name in ("lars", "lamb"):  # arXiv 1708.03888 and 1904.00962
        plugin.library("timm", f"--optimizer {name}")
        from timm.optim.lamb import Lamb
        from timm.optim.lars import Lars

        return Lamb(groups, **settings) if name == "lamb" else Lars(groups, **settings)
    # Fused optimizers pass over memory once; they take only real numbers without gaps in memory.
    dense = all(
        p.is_floating_point() and has_no_gaps(p) for group in groups for p in group["params"]
    )
    cls: Any = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    built: Optimizer = _never_compiled(cls)(groups, **{"fused": dense, **settings})
    if settings.get("momentum"):
        for parameter in parameters_of(built):
            # Without momenta fused SGD (torch 2.15) fails at a parameter that thaws later.
            built.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return built


def _own(name: str, groups: list[dict[str, Any]], settings: dict[str, Any]) -> Optimizer:
    """Return an optimizer of the user's class. Raises UsageError if it cannot be used."""
    cls: Any = plugin.load("optimizer", name)
    if not isinstance(cls, type) or not issubclass(cls, Optimizer):
        raise UsageError(f"--optimizer {name} is no class of torch.optim.Optimizer")
    if not plugin.takes(cls, groups, **settings):  # many have no weight decay
        settings.pop("weight_decay")
        groups = [{"params": group["params"]} for group in groups]
    if cls.__module__.startswith("torch.optim."):
        cls = _never_compiled(cls)
    built: Optimizer = cls(groups, **settings)
    if wants_closure(cls):
        raise UsageError(
            f"--optimizer {name} evaluates the loss several times a step, which is not supported"
        )
    return built


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def check_parameters(model: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
    """Raise UsageError unless each trained parameter of the model is in one
    optimizer, and no other parameter.
    """
    known = Counter(
        id(parameter) for optimizer in optimizers.values() for parameter in parameters_of(optimizer)
    )
    named = [*model.named_parameters()]
    if twice := [name for name, parameter in named if known[id(parameter)] > 1]:
        raise UsageError(f"two optimizers have {first_few(twice, 3)}: give each parameter to one")
    if missing := [name for name, each in named if each.requires_grad and id(each) not in known]:
        raise UsageError(
            f"the optimizer has no {first_few(missing, 3)}: give it these, or set "
            "requires_grad to False"
        )
    if foreign := len(known.keys() - {id(parameter) for _, parameter in named}):
        raise UsageError(foreign_parameters(foreign))


def foreign_parameters(count: int) -> str:
    """Return the message about parameters of an optimizer that the model does not have."""
    return (
        f"the optimizer has {counted(count, 'parameter')} that the model does not have: give the "
        "session all models by name, as in {'net': net, 'loss': loss}"
    )


def with_inner(optimizers: Mapping[str, Optimizer]) -> dict[str, Optimizer]:
    """Return optimizers by name, with those that they hold and that have a state of
    their own (SAM, Lookahead).
    """
    found = {}
    for name, optimizer in optimizers.items():
        found[name] = optimizer
        for attribute, inner in vars(optimizer).items():
            if isinstance(inner, Optimizer) and inner.state is not optimizer.state:
                found[f"{name}.{attribute}"] = inner
    return found


class AddsOnce:
    """The method `add_param_group` of the user's optimizer, which may come again after a resume.

    A checkpoint may have groups that the script adds later. They are added when it is loaded, so
    the script's own call adds nothing then.
    """

    def __init__(self, method: Callable[[dict[str, Any]], None]) -> None:
        self._method = method
        self.loaded = set[int]()  # the ids of parameters that loading has added

    def __call__(self, group: dict[str, Any]) -> None:
        """Add a group, unless loading has added its parameters."""
        given = group["params"]
        parameters = [given] if isinstance(given, Tensor) else [*given]
        ids = {id(parameter) for parameter in parameters}
        if ids and ids <= self.loaded:
            self.loaded -= ids
        else:
            self._method({**group, "params": parameters})


def add_groups(optimizer: Optimizer, groups: Sequence[Sequence[nn.Parameter]]) -> None:
    """Add the parameters that are in these groups of a checkpoint, but not in the optimizer."""
    mine = {id(parameter) for parameter in parameters_of(optimizer)}
    for number, parameters in enumerate(groups):
        new = [parameter for parameter in parameters if id(parameter) not in mine]
        if number < len(optimizer.param_groups):
            optimizer.param_groups[number]["params"].extend(new)
        elif new:
            optimizer.add_param_group({"params": new})
        if isinstance(add := optimizer.add_param_group, AddsOnce):
            add.loaded.update(map(id, new))


class Closed:
    """A method of the user's optimizer, `step` or `zero_grad`, that only an update may call."""

    _wrapped_by_lr_sched = True  # else schedulers wrap it, and warn of a missing step

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self.is_open = False

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the method. Raises UsageError outside of updates."""
        if not self.is_open:
            raise UsageError(
                "leave out optimizer.step() and zero_grad(): the end of the loop over "
                "micro-batches does both"
            )
        return self._method(*arguments, **options)


def can_skip_on_device(optimizer: Optimizer) -> bool:
    """Return whether the optimizer does nothing if its `found_inf` is 1, with no wait of
    the host for that number.

    It needs a state of each parameter: fused optimizers of torch begin one with uninitialised
    memory, even then.
    """
    for group in optimizer.param_groups:
        has_state = all(optimizer.state.get(p) for p in group["params"] if p.grad is not None)
        needs_none = isinstance(optimizer, torch.optim.SGD) and not group["momentum"]
        if not group.get("fused") or not (has_state or needs_none):
            return False
    return True


def divides_gradients(optimizer: Optimizer) -> bool:
    """Return whether the step is torch's own, which divides gradients by `grad_scale` first, and
    no hook looks at them before.
    """
    is_torchs = inspect.unwrap(type(optimizer).step).__module__.startswith("torch.optim.")
    supports = getattr(optimizer, "_step_supports_amp_scaling", False)
    return is_torchs and supports and not optimizer._optimizer_step_pre_hooks


def take_step(
    optimizer: Optimizer, found_inf: Tensor | None = None, grad_scale: Tensor | None = None
) -> None:
    """Let the optimizer change the weights, by its own `step`.

    A fused one does nothing if `found_inf`, [] float32, is 1, and else divides the gradients by
    `grad_scale`, [] float32.
    """
    closed = [
        method for method in (optimizer.step, optimizer.zero_grad) if isinstance(method, Closed)
    ]
    for method in closed:
        method.is_open = True
    given = {"found_inf": found_inf, "grad_scale": grad_scale}
    given = {name: number for name, number in given.items() if number is not None}
    vars(optimizer).update(given)  # as GradScaler does
    try:
        optimizer.step()
    finally:
        for method in closed:
            method.is_open = False
        for name in given:
            delattr(optimizer, name)


def wants_closure(cls: type[Optimizer]) -> bool:
    """Return whether the step of an optimizer cannot be called without a
    function that computes the loss.
    """
    if callable(getattr(cls, "first_step", None)) and callable(getattr(cls, "second_step", None)):
        return True  # SAM
    step = inspect.unwrap(cls.step)
    closure = inspect.signature(step).parameters.get("closure")
    if closure is None or closure.default is inspect.Parameter.empty:
        return closure is not None
    try:
        return _NEEDS_CLOSURE.search(inspect.getsource(step)) is not None
    except (OSError, TypeError):  # without its source
        return False


def check_own(optimizer: object) -> None:
    """Raise UsageError if what a program gives as its optimizer is none, or another
    library's wrapper of one.
    """
    if hasattr(optimizer, "skip_synchronize"):
        raise UsageError(
            "the optimizer is a hvd.DistributedOptimizer: give the plain one, the "
            "session sums gradients"
        )
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"the optimizer is {described(optimizer)}; it must be a torch.optim.Optimizer, or "
            "several by name: {'first': optimizer, 'second': another}"
        )
    if wants_closure(type(optimizer)):
        kind = type(optimizer).__name__
        raise UsageError(
            f"{kind} evaluates the loss several times a step, which is not "
            "supported: take another one"
        )


def match_memory_format(optimizer: Optimizer) -> None:
    """Give each state tensor its parameter's memory format, which may differ in a
    checkpoint (`--channels-last`).
    """
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if (
                isinstance(value, Tensor)
                and value.shape == parameter.shape
                and value.stride() != parameter.stride()
            ):
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _never_compiled(cls: type[T]) -> type[T]:
    """Return an optimizer class without torch.compile's wrappers: their first call
    imports the whole compiler.
    """
    names = ("add_param_group", "load_state_dict", "state_dict", "step", "zero_grad")
    methods = {name: inspect.unwrap(getattr(cls, name)) for name in names}
    methods["step"] = torch.no_grad()(methods["step"])  # as one of these wrappers does
    return type(cls.__name__, (cls,), methods)


def parameter_groups(config: OptimizerConfig, model: nn.Module) -> list[dict[str, Any]]:
    """Return the groups of trainable parameters; `--decay-of weights` exempts biases
    and normalisation layers.
    """
    norm_parameters = {
        id(p) for m in model.modules() if isinstance(m, _NORMS) for p in m.parameters(recurse=False)
    }
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_weight = id(parameter) not in norm_parameters and name.rpartition(".")[2] != "bias"
            groups[config.decay_of == "weights" and not is_weight]["params"].append(parameter)
    return [group for group in groups if group["params"]]


class MovingAverage(AveragedModel):
    """The exponential moving average of a model's weights and running statistics;
    other buffers are copies.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        nn.Module.__init__(self)  # AveragedModel's makes a plain deepcopy
        self.module = copied(model)
        self.register_buffer("n_averaged", torch.tensor(0))
        self._update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]

    @override
    def update_parameters(self, model: nn.Module) -> None:
        """Add the model's current values; the first call copies them."""
        pairs = [*zip(_averaged(self.module), _averaged(model), strict=True)]
        if self.n_averaged == 0:
            for mine, its in pairs:
                mine.copy_(its)
        else:
            for dtype in {mine.dtype for mine, _ in pairs}:
                mine_of_type, its_of_type = zip(
                    *(pair for pair in pairs if pair[0].dtype == dtype), strict=True
                )
                self._update(mine_of_type, its_of_type, self.n_averaged)
        buffers.copy_others(model, self.module)
        self.n_averaged += 1


def _averaged(model: nn.Module) -> list[Tensor]:
    """Return the tensors of a model that are averaged."""
    statistics = [
        buffer.tensor for buffer in buffers.buffers_of(model) if buffers.is_statistic(buffer)
    ]
    return [*(parameter.detach() for parameter in model.parameters()), *statistics]


def copied(model: nn.Module) -> nn.Module:
    """Return a copy of a model. Raises UsageError if an attribute cannot be copied.

    torch copies neither a tensor of a graph, such as an output that a module keeps, nor a
    compressed sparse one.
    """
    memo = {}
    for module in model.modules():
        for _, tensor in tensors_in(vars(module)):
            if not tensor.is_leaf or tensor.layout not in (torch.strided, torch.sparse_coo):
                memo[id(tensor)] = tensor.detach().clone()
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise UsageError(
            f"--ema-decay: torch cannot copy the model ({first_line(error)}): leave out the flag"
        ) from None


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Set the learning rate of the next step for all parameters."""
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), Tensor):
            # the optimizer may have compiled its step with this tensor
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate


def learning_rate_of(optimizer: Optimizer) -> float | None:
    """Return the learning rate of the first group, or None if the optimizer has none."""
    rate = optimizer.param_groups[0].get("lr")
    return None if rate is None else float(rate)
