"""Update a model's buffers in an optimizer step, equally on all ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hvd_train.network.buffers import Buffer, averaged, buffers_of, copy_into, is_statistic
from hvd_train.world.world import World


class StepBuffers:
    """Updates the buffers once a step: running statistics to a mean, all others to the value of micro-batch 0.

    Every micro-batch of a step starts from the same values, so the number of ranks does not change the result.
    """

    def __init__(self, model: nn.Module, device: torch.device, patterns: Sequence[str] = ()) -> None:
        """Average the buffers of `patterns`, too; `device` is the model's. Raises UsageError as `averaged` does."""
        names, buffers = averaged(model, patterns), buffers_of(model)
        mean = [buffer for buffer in buffers if buffer.name in names]
        floats = [buffer for buffer in mean if buffer.tensor.is_floating_point()]
        counts = [buffer for buffer in mean if not buffer.tensor.is_floating_point()]
        self._means = [_Means(kind, device) for kind in (floats, counts) if kind]
        self._others = [_Other(buffer) for buffer in buffers if buffer.name not in names]
        self._kinds: list[_Means | _Other] = [*self._means, *self._others]
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
        changed = [other.buffer for other in self._others if other.changed_by_pass()]
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
        for other in self._others:
            if other.buffer.name in self._new:
                copy_into(other.buffer, self._new[other.buffer.name])


class _Means:
    """Averaged buffers of one kind, floating point or integer; one tensor holds the changes of all of them."""

    def __init__(self, buffers: Sequence[Buffer], device: torch.device) -> None:
        # torch's layers write into their statistics; a user's layer may assign a new tensor.
        buffers = sorted(buffers, key=is_statistic, reverse=True)
        self._tensors = [buffer.tensor for buffer in buffers]
        self._assigned = [(n, buffer) for n, buffer in enumerate(buffers) if not is_statistic(buffer)]
        self._before = [torch.empty_like(tensor) for tensor in self._tensors]
        self._counts = not self._tensors[0].is_floating_point()
        self.changes, self._views = _row(self._tensors, torch.float32, device)
        self._step, self._step_views = _row(self._tensors, torch.int64 if self._counts else torch.float32, device)

    def begin(self) -> None:
        for number, buffer in self._assigned:
            self._tensors[number] = buffer.tensor
        torch._foreach_copy_(self._before, self._tensors)
        self.changes.zero_()

    def put_back(self) -> None:
        for number, buffer in self._assigned:
            buffer.put(self._tensors[number])
        torch._foreach_copy_(self._tensors, self._before)

    def add_changes(self) -> None:
        now = self._tensors[: len(self._tensors) - len(self._assigned)] + [b.tensor for _, b in self._assigned]
        torch._foreach_add_(self._views, torch._foreach_sub(now, self._before))

    def add(self, mean: Tensor) -> None:
        self._step.copy_(mean.round() if self._counts else mean)
        torch._foreach_add_(self._tensors, self._step_views)


def _row(tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    sizes = [tensor.numel() for tensor in tensors]
    row = torch.zeros(sum(sizes), dtype=dtype, device=device)
    return row, [part.view_as(tensor) for part, tensor in zip(torch.split(row, sizes), tensors, strict=True)]


class _Other:
    """A buffer that is not averaged, with its value before the step."""

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
