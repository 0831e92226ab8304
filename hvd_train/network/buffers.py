"""Find, average, copy and restore the buffers of a model; update them in a step; digest tensors."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hvd_train.world.world import World

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


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
    """Return whether this is a running statistic of batch norm or instance norm."""
    return isinstance(buffer.module, _NormBase) and buffer.key in _STATISTICS


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of `model` and the modes of its layers after this block, such as an evaluation."""
    before = [_Saved(buffer) for buffer in buffers_of(model)]
    modes = [(module, module.training) for module in model.modules()]  # a frozen layer may not be training
    try:
        yield
    finally:
        for saved in before:
            saved.put_back()
        for module, mode in modes:
            module.training = mode


class Modes:
    """Sets models to training mode at the begin of a step, if the program has left them in evaluation mode.

    Only models that are in evaluation mode as a whole are changed: their layers get the modes of the last step before.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = [(model, list(model.modules())) for model in models]
        self._of_last_step = dict[nn.Module, bool]()
        self._noted = False

    def begin_step(self) -> bool:
        """Begin a step; return whether a model was in evaluation mode for the first time."""
        found = False
        for model, modules in self._models:
            if not model.training:
                found = True
                model.train()  # a class may have one of its own
                for module in modules:
                    module.training = self._of_last_step.get(module, module.training)
            for module in modules:
                self._of_last_step[module] = module.training
        is_first = found and not self._noted
        self._noted = self._noted or found
        return is_first


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


class StepBuffers:
    """Updates the buffers once a step: running statistics to a mean, all others to the value of micro-batch 0.

    Every micro-batch of a step starts from the same values, so the number of ranks does not change the result.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """`device` is the model's."""
        buffers = buffers_of(model)
        mean = [buffer for buffer in buffers if is_statistic(buffer)]
        floats = [buffer for buffer in mean if buffer.tensor.is_floating_point()]
        counts = [buffer for buffer in mean if not buffer.tensor.is_floating_point()]
        self._means = [_Means(kind, device) for kind in (floats, counts) if kind]
        self.others = [_Saved(buffer) for buffer in buffers if not is_statistic(buffer)]  # not averaged
        self._kinds: list[_Means | _Saved] = [*self._means, *self.others]
        self._new, self._begun = dict[str, Tensor](), False

    def begin(self) -> None:
        """Save the values at the beginning of a step."""
        for kind in self._kinds:
            kind.begin()
        self._new, self._begun = {}, True

    def put_back(self) -> None:
        """Restore the values before the step. The backward pass comes first: autograd refuses changed statistics."""
        for kind in self._kinds if self._begun else []:
            kind.put_back()

    def end_micro_batch(self, number: int) -> None:
        """Record the changes by the forward pass of micro-batch `number`."""
        for mean in self._means:
            mean.add_changes()
        changed = [other.buffer for other in self.others if other.changed_by_pass()]
        if number == 0:
            self._new = {buffer.name: buffer.tensor.to("cpu", copy=True) for buffer in changed}

    @property
    def changes(self) -> list[Tensor]:
        """This rank's changes of averaged buffers: float32, 1-D, with the same lengths on all ranks."""
        return [mean.changes for mean in self._means]

    @property
    def others_changed(self) -> bool:
        """Whether micro-batch 0 ran here and changed a buffer that is not averaged."""
        return bool(self._new)

    def broadcast_others(self, world: World) -> None:
        """Broadcast the other buffers that micro-batch 0 changed on rank 0. Raises RankLost."""
        self._new = world.broadcast(self._new, 0)

    def finish(self, total: Tensor, num_micro_batches: int) -> None:
        """Set the buffers to their values after the step; `total` [n] is the sum of `changes` over all ranks."""
        self.put_back()
        self._begun = False
        for mean, part in zip(self._means, torch.split(total, [len(m.changes) for m in self._means]), strict=True):
            mean.add(part / num_micro_batches)
        for other in self.others:
            if other.buffer.name in self._new:
                copy_into(other.buffer, self._new[other.buffer.name])


class _Means:
    """Averaged buffers of one kind, floating point or integer; one tensor holds the changes of all of them."""

    def __init__(self, buffers: Sequence[Buffer], device: torch.device) -> None:
        self._buffers, self._tensors = buffers, [buffer.tensor for buffer in buffers]
        self._before = [torch.empty_like(tensor) for tensor in self._tensors]
        self._counts = not self._tensors[0].is_floating_point()
        self.changes, self._views = _row(self._tensors, torch.float32, device)
        self._step, self._step_views = _row(self._tensors, torch.int64 if self._counts else torch.float32, device)

    def begin(self) -> None:
        self._tensors = [buffer.tensor for buffer in self._buffers]
        torch._foreach_copy_(self._before, self._tensors)
        self.changes.zero_()

    def put_back(self) -> None:
        for buffer, tensor in zip(self._buffers, self._tensors, strict=True):
            buffer.put(tensor)  # a layer of the user's own may have assigned another
        torch._foreach_copy_(self._tensors, self._before)

    def add_changes(self) -> None:
        torch._foreach_add_(self._views, torch._foreach_sub([each.tensor for each in self._buffers], self._before))

    def add(self, mean: Tensor) -> None:
        self._step.copy_(mean.round() if self._counts else mean)
        torch._foreach_add_(self._tensors, self._step_views)


def _row(tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    sizes = [tensor.numel() for tensor in tensors]
    row = torch.zeros(sum(sizes), dtype=dtype, device=device)
    return row, [part.view_as(tensor) for part, tensor in zip(torch.split(row, sizes), tensors, strict=True)]


class _Saved:
    """A buffer with its value before a step or an evaluation."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer, self._tensor, self._value, self._version = buffer, buffer.tensor, buffer.tensor.clone(), -1
        # torch does not count writes through `tensor.data`. The first forward pass shows whether the buffer changes.
        self._compares: bool | None = None

    def begin(self) -> None:
        if self.has_changed():
            self._tensor = self.buffer.tensor
            self._value, self._version = self._tensor.clone(), self._tensor._version

    def put_back(self) -> None:
        if self.has_changed():
            self.buffer.put(self._tensor)
            if not torch.equal(self._tensor, self._value):
                self._tensor.copy_(self._value)
            self._version = self._tensor._version

    def changed_by_pass(self) -> bool:
        changed = self.has_changed()
        self._compares = changed if self._compares is None else self._compares
        return changed

    def has_changed(self) -> bool:
        now = self.buffer.tensor
        written = now is not self._tensor or now._version != self._version
        return written or (self._compares is not False and not torch.equal(now, self._value))


def digest_of(facts: str, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a digest of 32 hexadecimal digits. The tensors' order, device and memory format do not matter."""
    fingerprint = xxhash.xxh3_128(facts.encode())
    for name, tensor in sorted(tensors, key=lambda named: named[0]):
        fingerprint.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        values = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
        fingerprint.update(values.numpy().data)  # without the GIL: the heartbeat's thread runs meanwhile
    return fingerprint.hexdigest()


def digest_of_module(module: nn.Module) -> str:
    """Return a digest of the weights and buffers of a module, as `digest_of` does."""
    return digest_of("", tensors_in(module.state_dict()))


def tensors_in(values: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the path and value of each tensor in nested containers."""
    if isinstance(values, Tensor):
        yield name, values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield from tensors_in(value, f"{name}/{key}")
    elif isinstance(values, (list, tuple)):
        for place, value in enumerate(values):
            yield from tensors_in(value, f"{name}/{place}")
