"""What a step makes of buffers: the mean over its slots, or the value of slot 0; equal on all ranks after each step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from hvd_train.network.buffers import Buffer, averaged, buffers_of, copy_into, is_statistic
from hvd_train.world.world import World


class StepBuffers:
    """Moves the buffers of a model once a step, each by its rule (`buffers.averaged`): a mean, or the value of slot 0.

    The slots of a step, on all ranks, start from the same values, so neither the number of ranks nor the order of slots
    matters. What no slot changes (a frozen layer) stays the same to the last bit. After a fault in the middle of a step
    `undo` brings back the values from before it.
    """

    def __init__(self, model: nn.Module, device: torch.device, patterns: Sequence[str] = ()) -> None:
        """`patterns` name buffers to be averaged, besides running statistics; `device` is that of the model.

        Raises UsageError as `buffers.averaged` does.
        """
        names, buffers = averaged(model, patterns), buffers_of(model)
        mean = [buffer for buffer in buffers if buffer.name in names]
        # One call for all buffers of a type: a ResNet-50 has 159, and each would be a kernel of its own on a GPU, as it
        # is where a call has several types.
        types: dict[torch.dtype, list[Buffer]] = {}
        for buffer in mean:
            types.setdefault(buffer.tensor.dtype, []).append(buffer)
        self._means = [_MeanOverSlots(of_type, device) for of_type in types.values()]
        others = [buffer for buffer in buffers if buffer.name not in names]
        self._others = _ValueOfSlot0(others, device) if others else None
        self._rules: list[_MeanOverSlots | _ValueOfSlot0] = [*self._means, *([self._others] if self._others else [])]
        self._begun = self._moved = False

    def begin(self) -> None:
        """Note the values at the beginning of a step."""
        for rule in self._rules:
            rule.begin()
        self._begun, self._moved = True, False

    def begin_slot(self) -> None:
        """Put back the values from the beginning of the step, before the forward pass of a slot.

        Called after the backward pass of the slot before: autograd refuses a backward pass through a layer whose
        statistics have been written to since its forward pass.
        """
        if self._moved:
            for rule in self._rules:
                rule.put_back()
        self._moved = True

    def end_slot(self, number: int) -> None:
        """Take note of what the forward pass of slot `number` of the step has changed."""
        for mean in self._means:
            mean.end_slot()
        if self._others is not None and number == 0:
            self._others.end_slot_0()

    @property
    def changes(self) -> list[Tensor]:
        """What this rank has to tell of the step: float32 tensors of one dimension, of the same lengths on all ranks.

        Their sums over the ranks go to `finish`.
        """
        return [rule.changes for rule in self._rules]

    @property
    def has_news(self) -> bool:
        """Whether slot 0 was this rank's, and has changed a buffer of which `changes` does not tell yet."""
        return self._others is not None and bool(self._others.news)

    def exchange_news(self, world: World) -> None:
        """Tell all ranks what is new, where any rank has news; `changes` will tell of these buffers from then on.

        Raises RankLost.
        """
        if self._others is not None:
            self._others.exchange_news(world)

    def finish(self, total: Tensor, num_slots: int) -> None:
        """Set the buffers as the `num_slots` slots of a step that has been taken have it.

        `total` is the sum over all ranks of `changes`, joined into one tensor of one dimension.
        """
        self._begun = False
        if not self._rules:
            return
        parts = torch.split(total, [len(rule.changes) for rule in self._rules])
        for rule, part in zip(self._rules, parts, strict=True):
            rule.finish(part, num_slots)

    def undo(self) -> None:
        """Put back the values from the beginning of a step that is not taken, or was broken by a fault."""
        if self._begun:
            for rule in self._rules:
                rule.put_back()

    def bring_together(self, world: World) -> None:
        """Between two steps, give all ranks the values of rank 0 where a buffer has changed unseen.

        A forward pass that writes by way of `tensor.data` is unseen unless it does so in the first step of a world.
        Raises RankLost.
        """
        if self._others is not None:
            self._others.bring_together(world)


class _MeanOverSlots:
    """Buffers of one type, which move by the mean of what each slot changes in them.

    Their numbers come into rows, tensors of one dimension, by one call for all buffers: `_before` has their values
    before a step, and `_now` those after a slot. `changes` has the sum of this rank's changes.
    """

    def __init__(self, buffers: Sequence[Buffer], device: torch.device) -> None:
        # Layers of torch write into their statistics; a user's own may put new tensors in their stead.
        buffers = sorted(buffers, key=is_statistic, reverse=True)
        self._tensors = [buffer.tensor for buffer in buffers]
        self._own = [(n, buffer) for n, buffer in enumerate(buffers) if not is_statistic(buffer)]
        self._before, self._values_before = _row(self._tensors, device)
        self._now, self._values_now = _row(self._tensors, device)
        self.changes = torch.zeros(len(self._before), device=device)

    def begin(self) -> None:
        for number, buffer in self._own:
            self._tensors[number] = buffer.tensor
        torch._foreach_copy_(self._values_before, self._tensors)
        self.changes.zero_()

    def put_back(self) -> None:
        for number, buffer in self._own:
            buffer.put(self._tensors[number])
        torch._foreach_copy_(self._tensors, self._values_before)

    def end_slot(self) -> None:
        now = self._tensors[: len(self._tensors) - len(self._own)] + [buffer.tensor for _, buffer in self._own]
        torch._foreach_copy_(self._values_now, now)
        self.changes += self._now.sub_(self._before)

    def finish(self, total: Tensor, num_slots: int) -> None:
        mean = total / num_slots
        self._before += mean if self._before.is_floating_point() else mean.round().to(self._before.dtype)
        self.put_back()


def _row(tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Return zeros for all numbers of `tensors`, of one type, as one tensor of one dimension, and a view for each."""
    sizes = [tensor.numel() for tensor in tensors]
    row = torch.zeros(sum(sizes), dtype=tensors[0].dtype, device=device)
    return row, [part.view_as(tensor) for part, tensor in zip(torch.split(row, sizes), tensors, strict=True)]


class _ValueOfSlot0:
    """Buffers that have, after a step, the values that the forward pass of slot 0 has given them.

    Most models have some that never change (tables, masks), and what a model is going to change is not known before. So
    at first none of them travels. The first change of one is news, of which the ranks tell each other in an exchange of
    its own; from then on the buffer is live: its values travel with each step's message.
    """

    def __init__(self, buffers: Sequence[Buffer], device: torch.device) -> None:
        self._device = device
        self._held = [_Held(buffer) for buffer in buffers]
        self._live: list[_Held] = []
        self._quiet = self._held
        self._none = self.changes = torch.zeros(0, device=device)
        self._stepped = False
        self.news: dict[str, Tensor] = {}
        self._told: Mapping[str, Tensor] = {}

    def begin(self) -> None:
        for held in self._held:
            held.note()
        self.changes, self.news, self._told = self._none, {}, {}

    def put_back(self) -> None:
        _put_back([*self._live, *self._changed_quiet()])

    def end_slot_0(self) -> None:
        parts = []
        for held in self._live:
            if held.reshaped:
                self.news[held.buffer.name] = held.buffer.tensor.clone()
            parts.append(held.numbers(held.value if held.reshaped else held.buffer.tensor).to(self._device))
        if parts:
            self.changes = torch.cat(parts)
        for held in self._changed_quiet():
            self.news[held.buffer.name] = held.buffer.tensor.clone()

    def _changed_quiet(self) -> list[_Held]:
        # Writes by way of `tensor.data` escape torch's count: who makes them is found by value, in the first step.
        return [held for held in self._quiet if (held.touched if self._stepped else held.differs)]

    def exchange_news(self, world: World) -> None:
        offered = world.gather({name: value.cpu() for name, value in self.news.items()})
        self._told = {name: value for of_rank in offered for name, value in of_rank.items()}

    def finish(self, total: Tensor, num_slots: int) -> None:
        _put_back(self._changed_quiet())
        for held, part in zip(self._live, torch.split(total, [held.count for held in self._live]), strict=True):
            held.value.copy_(held.of_numbers(part))
        _put_back(self._live)
        self._stepped = True
        if self._told:
            self._set(self._told, self._told)

    def bring_together(self, world: World) -> None:
        if not self._stepped:
            return
        mine = {held.buffer.name: held.buffer.tensor.cpu() for held in self._held if held.differs}
        offered = world.gather(mine if world.place.rank == 0 else dict.fromkeys(mine))
        changed = {name for of_rank in offered for name in of_rank}
        if changed:
            _put_back([held for held in self._held if held.differs])
            self._set({name: value for name, value in offered[0].items() if value is not None}, changed)

    def _set(self, values: Mapping[str, Tensor], live: Collection[str]) -> None:
        """Set these buffers, and have those of `live`, besides the ones that are, travel with each message."""
        known = {held.buffer.name for held in self._live} | set(live)
        for held in self._held:
            if held.buffer.name in values:
                copy_into(held.buffer, values[held.buffer.name])
                held.note()
        self._live = [held for held in self._held if held.buffer.name in known]
        self._quiet = [held for held in self._held if held.buffer.name not in known]
        self._none = torch.zeros(sum(held.count for held in self._live), device=self._device)


_EXACT_IN_FLOAT32 = (torch.float32, torch.float16, torch.bfloat16, torch.int16, torch.int8, torch.uint8, torch.bool)


class _Held:
    """A buffer, the tensor that was there when the step began, and a copy of what it held."""

    tensor: Tensor
    value: Tensor

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.version = -1  # of no tensor

    @property
    def touched(self) -> bool:
        """Whether there is another tensor now, or this one has been written to as torch counts it."""
        return self.version < 0 or self.buffer.tensor is not self.tensor or self.tensor._version != self.version

    @property
    def reshaped(self) -> bool:
        """Whether there is a tensor of another shape or type now."""
        now = self.buffer.tensor
        return now.shape != self.value.shape or now.dtype != self.value.dtype

    @property
    def differs(self) -> bool:
        """Whether the buffer holds something else now."""
        now = self.buffer.tensor
        return self.reshaped or now.device != self.value.device or not torch.equal(now, self.value)

    def note(self) -> None:
        """Take the buffer as it is now for the beginning of a step."""
        if self.touched:
            self.tensor = self.buffer.tensor
            if self.version < 0 or self.reshaped or self.value.device != self.tensor.device:
                self.value = self.tensor.clone()
            else:
                self.value.copy_(self.tensor)
            self.count = self.numbers(self.value).numel()
            self.version = self.tensor._version

    # A message is a sum of float32 numbers, of which all ranks but one give zeros: integers beyond 2^24 and float64
    # travel as the 16-bit pieces of their memory.
    def numbers(self, tensor: Tensor) -> Tensor:
        """Return what a tensor of this buffer's shape and type holds as float32 numbers, exactly."""
        flat = tensor.reshape(-1)
        return (flat if flat.dtype in _EXACT_IN_FLOAT32 else flat.view(_pieces(flat.dtype))).float()

    def of_numbers(self, numbers: Tensor) -> Tensor:
        """Return the tensor of which `numbers` are those that the method of this name returns."""
        dtype = self.value.dtype
        if dtype in _EXACT_IN_FLOAT32:
            return numbers.to(dtype).view(self.value.shape)
        return numbers.to(_pieces(dtype)).view(dtype).view(self.value.shape)


def _pieces(dtype: torch.dtype) -> torch.dtype:
    """Return the type of the pieces as which numbers of a type travel that float32 does not hold exactly."""
    return torch.uint8 if dtype.itemsize == 1 else torch.int16


def _put_back(some: Sequence[_Held]) -> None:
    """Put the tensors that were there when the step began where they were, with `value` in them."""
    for held in some:
        held.buffer.put(held.tensor)
    if some:
        torch._foreach_copy_([held.tensor for held in some], [held.value for held in some])
    for held in some:
        held.version = held.tensor._version
