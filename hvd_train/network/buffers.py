"""Find, average, copy and restore the buffers of a model."""

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from hvd_train.errors import UsageError


@dataclass(frozen=True)
class Buffer:
    """A buffer of a module. A forward pass may write into its tensor or assign another one."""

    name: str  # in the model, as in `named_buffers`
    module: nn.Module
    key: str  # its name in the module

    @property
    def tensor(self) -> Tensor:
        """The current tensor, detached from any graph."""
        tensor = self.module._buffers[self.key]
        assert tensor is not None
        return tensor if tensor.grad_fn is None else tensor.detach()

    def put(self, tensor: Tensor) -> None:
        """Assign another tensor."""
        self.module._buffers[self.key] = tensor


def buffers_of(model: nn.Module) -> list[Buffer]:
    """Return each buffer of `model` once, in the order of `named_buffers`."""
    found: dict[int, Buffer] = {}
    for path, module in model.named_modules():
        for key, tensor in module._buffers.items():
            if tensor is not None and tensor.layout == torch.strided:
                found.setdefault(id(tensor), Buffer(f"{path}.{key}" if path else key, module, key))
    return list(found.values())


def is_statistic(buffer: Buffer) -> bool:
    """Return whether batch norm or instance norm owns this buffer."""
    return isinstance(buffer.module, (_BatchNorm, _InstanceNorm))


def averaged(model: nn.Module, patterns: Sequence[str]) -> set[str]:
    """Return the names of buffers that a step averages over micro-batches.

    These are running statistics and matches of `patterns` (`--average-buffers`); others take micro-batch 0's value.
    Raises UsageError if a pattern matches no buffer, or a buffer without numbers to average.
    """
    buffers = buffers_of(model)
    names = {buffer.name for buffer in buffers if is_statistic(buffer)}
    for pattern in patterns:
        matching = [buffer for buffer in buffers if fnmatchcase(buffer.name, pattern)]
        if not matching:
            others = [buffer.name for buffer in buffers if not is_statistic(buffer)]
            known = f"they are called {', '.join(others[:4])}{', ...' * (len(others) > 4)}" if others else "it has none"
            raise UsageError(
                f"--average-buffers: no buffer of the model is called {pattern}; besides running statistics, {known}"
            )
        for buffer in matching:
            if not (buffer.tensor.is_floating_point() or buffer.tensor.dtype in (torch.int32, torch.int64)):
                kind = str(buffer.tensor.dtype).removeprefix("torch.")
                raise UsageError(f"--average-buffers {pattern}: {buffer.name} holds {kind}, which has no mean")
        names.update(buffer.name for buffer in matching)
    return names


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of `model` after this block: an evaluation must not change them."""
    before = [(buffer, buffer.tensor, buffer.tensor.clone()) for buffer in buffers_of(model)]
    try:
        yield
    finally:
        for buffer, tensor, value in before:
            buffer.put(tensor)
            if not torch.equal(tensor, value):
                tensor.copy_(value)


def not_in_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return by name the buffers of `model` that were registered with persistent=False."""
    return {b.name: b.tensor for b in buffers_of(model) if b.key in b.module._non_persistent_buffers_set}


def load(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Load `values` by name into buffers outside of the state_dict; skip unknown names."""
    buffers = {buffer.name: buffer for buffer in buffers_of(model)}
    for name, value in values.items():
        if name in buffers:
            copy_into(buffers[name], value)


def copy_into(buffer: Buffer, value: Tensor) -> None:
    """Copy `value` into a buffer. A tensor that does not fit is replaced."""
    here = buffer.tensor
    expanded = any(size > 1 and stride == 0 for size, stride in zip(here.shape, here.stride(), strict=True))
    if (here.shape, here.dtype) == (value.shape, value.dtype) and not expanded:
        here.copy_(value)
    else:
        buffer.put(value.detach().to(here.device, copy=True))


def copy_others(source: nn.Module, target: nn.Module, names: Set[str]) -> None:
    """Copy the buffers of `source`, except `names`, to its copy `target`."""
    for buffer, own in zip(buffers_of(source), buffers_of(target), strict=True):
        if buffer.name not in names:
            copy_into(own, buffer.tensor)
