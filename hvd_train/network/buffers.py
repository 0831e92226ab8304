"""Find, average, copy and restore the buffers of a model; update them in a step."""

import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hvd_train.errors import UsageError
from hvd_train.world.world import World

_WATCHED_STEPS = 3
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class Buffer:
    """A buffer of a module. A forward pass may write into its tensor or assign another one."""

    name: str  # in the model, as in `named_buffers`
    module: nn.Module
    key: str  # its name in the module

    @property
    def value(self) -> Tensor | None:
        """The current tensor, detached from any graph; None if it is registered without one."""
        tensor = self.module._buffers.get(self.key)
        return tensor if tensor is None or tensor.grad_fn is None else tensor.detach()

    @property
    def tensor(self) -> Tensor:
        """The current tensor of a buffer that has one."""
        tensor = self.value
        assert tensor is not None
        return tensor

    @property
    def is_saved(self) -> bool:
        """Whether the state_dict has it."""
        return self.key not in self.module._non_persistent_buffers_set

    def put(self, tensor: Tensor | None) -> None:
        """Assign another tensor."""
        self.module._buffers[self.key] = tensor


def buffers_of(model: nn.Module) -> list[Buffer]:
    """Return each buffer of `model` that has a tensor once, in the order of `named_buffers`."""
    return [buffer for buffer in _registered(model) if buffer.value is not None]


def _registered(model: nn.Module) -> list[Buffer]:
    """Return each buffer of `model` once, also those that may get a tensor later."""
    found: dict[object, Buffer] = {}
    for path, module in model.named_modules():
        for key, tensor in module._buffers.items():
            buffer = Buffer(f"{path}.{key}" if path else key, module, key)
            if tensor is not None or not is_statistic(buffer):
                found.setdefault(id(tensor) if tensor is not None else buffer.name, buffer)
    return list(found.values())


def is_statistic(buffer: Buffer) -> bool:
    """Return whether this is a running statistic of batch norm or instance norm."""
    return isinstance(buffer.module, _NormBase) and buffer.key in _STATISTICS


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of `model` and the modes of its layers after this
    block, such as an evaluation.
    """
    before = [_Saved(buffer) for buffer in _registered(model)]
    # a frozen layer may not be training
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for saved in before:
            saved.put_back()
        for module, mode in modes:
            module.training = mode


class Writes:
    """Finds writes to the weights and buffers of a model, which torch counts."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [*model.parameters()]
        self._tables = [module._buffers for module in model.modules()]
        self.note()

    def note(self) -> None:
        """Forget the writes so far."""
        self._before = self._versions()

    def found(self) -> bool:
        """Return whether a tensor has been written to, or a buffer replaced, since `note`."""
        now = self._versions()
        pairs = zip(now, self._before, strict=False)
        same = all(one is other and version == before for (one, version), (other, before) in pairs)
        return len(now) != len(self._before) or not same

    def _versions(self) -> list[tuple[Tensor, int]]:
        if not self._parameters:  # of a loop that writes to no model
            return []
        in_tables = [
            tensor for table in self._tables for tensor in table.values() if tensor is not None
        ]
        return [(tensor, tensor._version) for tensor in self._parameters + in_tables]


class Modes:
    """Sets models to training mode at the begin of a step, if the program has
    left them in evaluation mode.

    Only models that are in evaluation mode as a whole are changed: their layers get the modes of
    the last step before.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = [(model, list(model.modules())) for model in models]
        self._of_last_step = dict[nn.Module, bool]()

    def begin_step(self) -> bool:
        """Begin a step; return whether a model was in evaluation mode."""
        found = False
        for model, modules in self._models:
            if not model.training:
                found = True
                model.train()  # a class may have one of its own
                for module in modules:
                    module.training = self._of_last_step.get(module, module.training)
            for module in modules:
                self._of_last_step[module] = module.training
        return found


def not_in_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return by name the buffers of `model` that were registered with
    persistent=False, as `kept` does.
    """
    return kept({buffer.name: buffer.tensor for buffer in buffers_of(model) if not buffer.is_saved})


def put(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy values by name into the buffers of a model, but not into caches of other sizes.

    A saved buffer may get another size, which `load_state_dict` would refuse.
    """
    for buffer in _registered(model):
        value = values.get(plain_name(buffer.name))
        here = buffer.value
        fits = here is not None and value is not None and here.shape == value.shape
        if value is not None and (buffer.is_saved or fits):
            copy_into(buffer, value)


def may_change_shape(model: nn.Module) -> set[str]:
    """Return the names of buffers in the state_dict that passes may fill, or give another shape."""
    return {
        buffer.name for buffer in _registered(model) if buffer.is_saved and not is_statistic(buffer)
    }


def copy_others(source: nn.Module, target: nn.Module) -> None:
    """Copy all buffers that are no running statistics from a model to its copy."""
    others = [buffer for buffer in buffers_of(source) if not is_statistic(buffer)]
    put(target, {plain_name(buffer.name): buffer.tensor for buffer in others})


def copy_into(buffer: Buffer, value: Tensor | None) -> None:
    """Copy `value` into a buffer. A tensor that does not fit is replaced."""
    here = buffer.value
    if value is None or here is None or is_sparse(here) or is_sparse(value):
        device = _device_of(buffer.module) if here is None else here.device
        buffer.put(None if value is None else value.detach().to(device, copy=True))
        return
    expanded = any(
        size > 1 and stride == 0 for size, stride in zip(here.shape, here.stride(), strict=True)
    )
    if (here.shape, here.dtype) == (value.shape, value.dtype) and not expanded:
        here.copy_(value)
    else:
        buffer.put(value.detach().to(here.device, copy=True))


class StepBuffers:
    """Updates the buffers once a step: running statistics to a mean, all others to
    the value of micro-batch 0.

    Every micro-batch of a step starts from the same values, so the number of ranks does not change
    the result. Caches, which are buffers outside of the state_dict that passes make or give another
    shape, are left to their modules.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, is_exact: bool = False) -> None:
        """`device` is the model's; `is_exact`: changes are added in the order of micro-batches."""
        self._is_exact = is_exact
        self._model = model
        self._device = device
        self._tables = [module._buffers for module in model.modules()]
        self._num_registered = self._count()
        buffers = _registered(model)
        self._names = {buffer.name for buffer in buffers}
        by_type = dict[torch.dtype, list[Buffer]]()
        for buffer in filter(is_statistic, buffers):
            by_type.setdefault(buffer.tensor.dtype, []).append(buffer)
        self._means = [_Means(of_type, device) for of_type in by_type.values()]
        # not averaged
        self.others = [_Saved(buffer) for buffer in buffers if not is_statistic(buffer)]
        self._kinds: list[_Means | _Saved] = [*self._means, *self.others]
        self._new = dict[str, Tensor | None]()
        self._begun = False
        self._has_run = False  # a pass of this step on this rank
        # the values after this rank's first pass in a step
        self._first: dict[str, Tensor | None] | None = None
        self._steps = 0
        # the buffers that have got other values in one micro-batch than in another
        self.differing = set[str]()

    def begin(self, num_micro_batches: int) -> None:
        """Save the values at the beginning of a step with this many micro-batches of all ranks."""
        for mean in self._means:
            mean.begin(num_micro_batches if self._is_exact else 1)
        for other in self.others:
            other.begin()
        self._new = {}
        self._begun = True
        self._has_run = False
        self._first = None
        self._steps += 1

    def begin_micro_batch(self) -> None:
        """Restore the values before the step, if a pass of it may have changed them."""
        if self._has_run:
            self.put_back()
        self._has_run = True

    def put_back(self) -> None:
        """Restore the values before the step.

        The backward pass comes first: autograd refuses changed statistics.
        """
        for kind in self._kinds if self._begun else []:
            kind.put_back()

    def end_micro_batch(self, number: int) -> None:
        """Record the changes by the forward pass of micro-batch `number`.

        Raises UsageError for some new buffers.
        """
        for mean in self._means:
            mean.add_changes(number if self._is_exact else 0)
        changed = [saved.buffer for saved in self.others if saved.changed_by_pass()]
        # A GPU would have to wait for the comparison.
        is_watched = self._device.type == "cpu" or self._steps <= _WATCHED_STEPS
        if number == 0 or is_watched:
            values = {buffer.name: _on_host(buffer.value) for buffer in changed}
        if number == 0:
            self._new = values
        if is_watched:
            if self._first is None:
                self._first = values
            else:
                self._note_different(values, self._first)
        if self._count() != self._num_registered:
            self._check_new_ones()

    def _count(self) -> int:
        return sum(map(len, self._tables))

    def _check_new_ones(self) -> None:
        for buffer in _registered(self._model):
            if buffer.is_saved and buffer.name not in self._names:
                raise UsageError(
                    f"a forward pass has registered the buffer {buffer.name}: register it in "
                    "__init__, as None or empty, or with persistent=False if it is a cache"
                )
        self._num_registered = self._count()

    def _note_different(
        self, changed: Mapping[str, Tensor | None], first: Mapping[str, Tensor | None]
    ) -> None:
        rounding = 0.0 if self._device.type == "cpu" else 1e-5
        for name in changed.keys() | first.keys():
            both = name in changed and name in first
            if not (both and _alike(changed[name], first[name], rounding)):
                self.differing.add(name)

    @property
    def changes(self) -> list[Tensor]:
        """This rank's changes of averaged buffers: floating point, 1-D, with the
        same lengths on all ranks. With exact sums: by each micro-batch of all ranks.
        """
        return [mean.changes for mean in self._means]

    @property
    def others_changed(self) -> bool:
        """Whether micro-batch 0 ran here and changed a buffer that is not averaged."""
        return bool(self._new)

    def broadcast_others(self, world: World) -> None:
        """Send the other buffers that micro-batch 0 changed on rank 0; compare those of all ranks.

        Raises RankLost.
        """
        first = self._first
        if first is not None:
            first = {name: first[name] for name in first.keys() - self.differing}
        (self._new, _), *others = world.gather((self._new, first))
        for _, changed in others:
            if changed is not None:
                self._note_different(changed, self._new)

    def finish(self, total: Tensor, num_micro_batches: int) -> None:
        """Set the buffers to their values after the step; `total` [n] is the sum of
        `changes` over all ranks.
        """
        self._begun = False
        for other in self.others:
            other.put_back()
        if self._means:  # to split nothing takes as long as to add
            parts = torch.split(total, [len(mean.changes) for mean in self._means])
            for mean, part in zip(self._means, parts, strict=True):
                mean.add(part, num_micro_batches)
        for other in self.others:
            if other.buffer.name in self._new:
                copy_into(other.buffer, self._new[other.buffer.name])


class _Means:
    """Averaged buffers of one type.

    Flat tensors hold the values of all of them: on a GPU, arithmetic on a list of small tensors
    takes a launch for each if their types differ, and memory for each result.
    """

    def __init__(self, buffers: Sequence[Buffer], device: torch.device) -> None:
        self._buffers = buffers
        self._tensors = [buffer.tensor for buffer in buffers]
        of_buffers = self._tensors[0].dtype
        self._counts = not of_buffers.is_floating_point
        self._before, self._views_before = _row(self._tensors, device)
        self._now, self._views_now = _row(self._tensors, device)
        dtype = of_buffers if self._counts else torch.promote_types(of_buffers, torch.float32)
        # of the changes, in one row or in one for each micro-batch
        self._sums = torch.zeros(1, len(self._now), dtype=dtype, device=device)

    @property
    def changes(self) -> Tensor:
        return (self._sums.float() if self._counts else self._sums).view(-1)

    def begin(self, rows: int) -> None:
        self._tensors = [buffer.tensor for buffer in self._buffers]
        torch._foreach_copy_(self._views_before, self._tensors)
        if rows != len(self._sums):
            self._sums = self._sums.new_empty(rows, len(self._now))
        self._sums.zero_()

    def put_back(self) -> None:
        for buffer, tensor in zip(self._buffers, self._tensors, strict=True):
            buffer.put(tensor)  # a layer of the user's own may have assigned another
        torch._foreach_copy_(self._tensors, self._views_before)

    def add_changes(self, row: int) -> None:
        torch._foreach_copy_(self._views_now, [buffer.tensor for buffer in self._buffers])
        self._sums[row].add_(self._now.sub_(self._before))

    def add(self, total: Tensor, num_micro_batches: int) -> None:
        rows = total.view(self._sums.shape)
        # to add up a single row would be one more launch on a GPU
        mean = (rows[0] if len(rows) == 1 else rows.sum(0)) / num_micro_batches
        self._before.add_((mean.round() if self._counts else mean).to(self._sums.dtype))
        self.put_back()


def _row(tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    sizes = [tensor.numel() for tensor in tensors]
    row = torch.zeros(sum(sizes), dtype=tensors[0].dtype, device=device)
    return row, [
        part.view_as(tensor) for part, tensor in zip(torch.split(row, sizes), tensors, strict=True)
    ]


class _Saved:
    """A buffer with its value before a step or an evaluation."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self._keep()
        # torch does not count writes through `tensor.data`. On a GPU, which would have to wait for
        # each comparison, the first forward pass shows whether the buffer changes.
        self._compares: bool | None = None
        if self._value is None or self._value.device.type == "cpu":
            self._compares = True

    def _keep(self) -> None:
        self._note()
        self._value = None if self._tensor is None else self._tensor.clone()

    def _note(self) -> None:
        self._tensor = self.buffer.value
        self._version = -1 if self._tensor is None else self._tensor._version

    def begin(self) -> None:
        if self.has_changed():
            self._keep()

    def put_back(self) -> None:
        if self.has_changed():
            self.buffer.put(self._tensor)
            if self._value is not None and not _equal(self.buffer.tensor, self._value):
                copy_into(self.buffer, self._value)
            self._note()

    def changed_by_pass(self) -> bool:
        changed = self.has_changed()
        self._compares = changed if self._compares is None else self._compares
        return changed

    def has_changed(self) -> bool:
        now = self.buffer.value
        if now is None or self._value is None or now.shape != self._value.shape:
            if not self.buffer.is_saved:  # the module has made room in a cache, and may count on it
                self._keep()
            return self.buffer.is_saved and now is not self._value
        written = now is not self._tensor or now._version != self._version
        return written or (self._compares is not False and not _equal(now, self._value))


def _on_host(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.to("cpu", copy=True)


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.layout != other.layout:
        return False
    return all(map(torch.equal, dense_parts(one), dense_parts(other)))


def _alike(one: Tensor | None, other: Tensor | None, rounding: float) -> bool:
    """Return whether two tensors are equal but for this relative rounding."""
    if one is None or other is None:
        return one is other
    if (one.shape, one.layout, one.dtype) != (other.shape, other.layout, other.dtype):
        return False
    if one.layout != torch.strided or not one.is_floating_point():
        return _equal(one, other)
    return torch.allclose(one, other, rounding, 0.0, equal_nan=True)


def is_sparse(tensor: Tensor) -> bool:
    """Return whether a tensor has one of torch's sparse layouts."""
    return tensor.layout != torch.strided


def dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the dense tensors that a tensor consists of: itself, or the indices
    and values of a sparse one.
    """
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


_LAYOUT = "sparse"  # the key of the layout in a sparse tensor that is kept as a dict
_LAYOUTS = {
    str(layout): layout
    for layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
}


def kept(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state_dict whose tensors are dense and whose other values are
    plain, as snapshots have them.
    """
    return {name: _kept(value) for name, value in state.items()}


def _kept(value: Any) -> Any:
    if isinstance(value, Tensor) and is_sparse(value):
        coalesced = value.layout == torch.sparse_coo and value.is_coalesced()
        facts = {_LAYOUT: str(value.layout), "shape": list(value.shape), "coalesced": coalesced}
        return {**facts, "parts": list(dense_parts(value))}
    return value.getvalue() if isinstance(value, io.BytesIO) else value


def given(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state_dict of which `kept` has made this one, under the names of a model
    that is not compiled. An io.BytesIO stays bytes.
    """
    return {plain_name(name): _given(value) for name, value in state.items()}


def _given(value: Any) -> Any:
    if not (isinstance(value, dict) and _LAYOUT in value):
        return value
    parts = value["parts"]
    shape = value["shape"]
    if value[_LAYOUT] == str(torch.sparse_coo):
        indices, values = parts
        return torch.sparse_coo_tensor(
            indices, values, shape, is_coalesced=value["coalesced"], check_invariants=False
        )
    compressed, plain, values = parts
    return torch.sparse_compressed_tensor(
        compressed, plain, values, shape, layout=_LAYOUTS[value[_LAYOUT]], check_invariants=False
    )


def _device_of(module: nn.Module) -> torch.device:
    tensors = itertools.chain(module.parameters(), module.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def plain_name(name: str) -> str:
    """Return the name of a tensor in a model as it is without torch.compile."""
    return name.replace("_orig_mod.", "")
