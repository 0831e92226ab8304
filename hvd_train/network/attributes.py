"""Find state in plain attributes of modules and optimizers, which checkpoints do not have."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

IN_PASSES = (
    "a forward pass changes plain attributes of the model ({}), which commits do not have: if a "
    "later pass reads them, make them buffers (register_buffer)"
)
IN_STEPS = (
    "a step changes plain attributes of the optimizer ({}), which commits do not have: if a "
    "later step reads them, keep them in optimizer.state or in a param group"
)
_OF_TORCH = vars(nn.Module()).keys()


def values_of(thing: nn.Module | Optimizer) -> dict[str, list[object]]:
    """Return the numbers and tensors in plain attributes of an optimizer or of modules."""
    named = thing.named_modules() if isinstance(thing, nn.Module) else [("", thing)]
    return {
        f"{name}.{attribute}" if name else attribute: leaves
        for name, each in named
        for attribute, value in vars(each).items()
        if attribute not in _OF_TORCH and (leaves := _leaves(value))
    }


def changed(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Return the names of the attributes that have got other values.

    One without a value before may be a cache.
    """
    return [name for name, value in now.items() if before.get(name, value) != value]


def _leaves(value: object) -> list[object]:
    """Return the numbers in tuples and lists, and for each tensor which one it is, with
    the count of writes to it.

    A tensor that needs a gradient is no state: its graph is freed by the backward pass.
    """
    if isinstance(value, (tuple, list)):
        return [leaf for each in value for leaf in _leaves(each)]
    if isinstance(value, Tensor):
        is_state = not value.requires_grad and not value.is_inference()
        return [(id(value), value._version)] if is_state else []
    return [value] if type(value) in (int, float) else []
