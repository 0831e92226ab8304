"""How the training state of one rank becomes that of all: its outline first, then its tensors, memory to memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hvd_train import handover
from hvd_train.console import say
from hvd_train.errors import UsageError
from hvd_train.handover import Handover, Unit
from hvd_train.network import normalization, optim
from hvd_train.state import Snapshot, TrainState, check_same_shapes, confirm_equal
from hvd_train.travel import may_travel
from hvd_train.world.wire import as_it_lies, has_no_gaps
from hvd_train.world.world import World, unwatched

_QUIET_S = 3.0  # a transfer that takes no longer is not worth a line
_EVERY_S = 10.0

# In this order: whatever loading an optimizer does to weights is undone by the weights that come after it.
_WITH_TENSORS = ("optimizer", "average", "model", "buffers")


@may_travel
@dataclass(frozen=True)
class Outline:
    """What stands for a tensor in the message that comes before the tensors."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """How its numbers lie in memory, without gaps, as they travel."""
    dtype: torch.dtype
    on_host: bool

    @staticmethod
    def of(tensor: Tensor) -> Outline:
        """Return the outline of a tensor; one with gaps in memory travels as a copy without them."""
        dense = torch.empty_like(tensor, device="meta")
        return Outline(tuple(tensor.shape), dense.stride(), tensor.dtype, tensor.device.type == "cpu")

    def fits(self, tensor: object) -> bool:
        """Return whether the numbers of `tensor` may be sent from, or received into, the place where they lie."""
        return (
            isinstance(tensor, Tensor)
            and (tuple(tensor.shape), tensor.dtype) == (self.shape, self.dtype)
            and all(
                mine == theirs
                for size, mine, theirs in zip(self.shape, tensor.stride(), self.stride, strict=True)
                if size > 1
            )
        )

    def empty(self, device: torch.device | str) -> Tensor:
        """Return a tensor that fits, of any values."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


def synchronize(state: TrainState, world: World, root: int, *, keep: bool = False) -> None:
    """Give every rank the state of rank `root`, and prove that all are equal.

    Tensors are received in place. So after a RankLost a rank that held another state has a mixture of the two, while
    one that held the same is unchanged. With `keep` this rank has its own state until it has all of the other, at the
    cost of memory for both. Raises ReplicasDiffer where the ranks are not equal, RankLost where one is gone, and
    UsageError where the state is of another model or optimizer.
    """
    outline = _outline(state, world, root)
    live = state.live()
    if world.place.rank == root:
        _fill(_pairs_of(outline, live), world, root)
    elif keep:
        live = {**outline, **{name: _filled(outline[name], None) for name in _WITH_TENSORS}}
        _fill(_pairs_of(outline, live), world, root)
        state.load(live)
    else:
        live = _room_for(state, outline)
        _fill(_pairs_of(outline, live), world, root)
        state.load_values(outline)
        state.load_buffers(live["buffers"])
    confirm_equal(state, world)


def hand_over(state: TrainState, world: World, root: int, *, has_it: bool, begin: int = 0) -> Handover:
    """Give the state of rank `root`, which is training, to those that lack it: most of it beside the next steps.

    What is returned has still to be given, and this function gives the rest. Where the state is small, or cannot be
    given in parts, it gives all of it and proves that all ranks are equal, as `synchronize` does. `has_it` says whether
    this rank has the state already; those that lack it have its elements from 0 to `begin`. Raises as `synchronize`.
    """
    outline = _outline(state, world, root)
    live = state.live() if has_it else _room_for(state, outline)
    pairs = _pairs_of(outline, live)
    units = _units(state)
    later = {tensor.data_ptr() for unit in units for tensor in unit}
    numbers = {number for number, (_, tensor) in enumerate(pairs) if tensor.data_ptr() in later}
    possible = (
        optim.is_elementwise(state.optimizer)
        and not normalization.is_synchronised(state.model)
        and handover.num_bytes(units) > handover.AT_ONCE_BYTES
        and all(pairs[number][0].fits(pairs[number][1]) for number in numbers)
    )
    plans = world.gather((numbers, [len(unit) for unit in units]) if possible else None)
    if plans[0] is None or any(plan != plans[0] for plan in plans):
        units, numbers = [], set()
    _fill([pair for number, pair in enumerate(pairs) if number not in numbers], world, root)
    if not has_it:
        state.load_values(outline)
        state.load_buffers(live["buffers"])
    if not units:
        confirm_equal(state, world)
    told: Callable[[int], None] = unwatched
    if world.place.rank == root:
        told = _Told(handover.num_bytes(units), "handing over the state beside training")
    return Handover(world, root, units, keep=has_it, begin=begin, sent=told)


def send(weights: Mapping[str, Any], world: World, root: int) -> None:
    """Fill the tensors of every rank, which all have the same names, with those of rank `root`."""
    outline = world.broadcast(_outlined(weights), root)
    _fill(list(_pairs(outline, weights)), world, root)


def copies(tensors: Sequence[Tensor] | None, world: World, root: int, device: torch.device) -> list[Tensor] | None:
    """Return on every rank copies of the `tensors` of rank `root`, on its `device`; None where they are None there.

    They lie in memory in the same way on all ranks. Raises RankLost.
    """
    outlines = world.broadcast(None if tensors is None else [Outline.of(tensor) for tensor in tensors], root)
    if outlines is None:
        return None
    received = [outline.empty("cpu" if outline.on_host else device) for outline in outlines]
    if tensors is not None and world.place.rank == root:
        for copy, tensor in zip(received, tensors, strict=True):
            copy.copy_(tensor)
    world.broadcast_tensors(received, root)
    return received


def _outline(state: TrainState, world: World, root: int) -> Snapshot:
    """Return on every rank the state of rank `root` with an outline in the place of every tensor."""
    live = state.live() if world.place.rank == root else {}
    return world.broadcast({**live, **{name: _outlined(live[name]) for name in _WITH_TENSORS if live}}, root)


def _room_for(state: TrainState, outline: Snapshot) -> Snapshot:
    """Give the optimizer of `state` what `outline` says, and return the tensors to fill, of any values yet.

    Raises UsageError, before anything is changed, where the outline is of another model or optimizer.
    """
    for mine, theirs in ((state.model, outline["model"]), (state.average, outline["average"])):
        check_same_shapes({} if mine is None else mine.state_dict(), theirs or {})
    try:
        state.optimizer.load_state_dict(_with_room(outline["optimizer"], state.optimizer))
    except ValueError as error:
        raise UsageError(f"the state of the other ranks is of another optimizer: {error}") from None
    optim.match_memory_format(state.optimizer)
    live = state.live()
    # Those in no state_dict may have another shape here, or be missing.
    device = next(state.model.parameters()).device
    live["buffers"] = [_filled(*both, device) for both in zip(outline["buffers"], live["buffers"], strict=True)]
    return live


def _pairs_of(outline: Snapshot, live: Snapshot) -> list[tuple[Outline, Tensor]]:
    return [pair for name in _WITH_TENSORS for pair in _pairs(outline[name], live[name])]


def _units(state: TrainState) -> list[Unit]:
    """Return what belongs to each parameter that lies in memory without gaps, with its elements in the same order."""
    averages = {} if state.average is None else dict(state.average.module.named_parameters())
    units = []
    for name, parameter in state.model.named_parameters():
        if has_no_gaps(parameter):
            others = [*state.optimizer.state.get(parameter, {}).values(), averages.get(name)]
            alike = [
                other
                for other in others
                if isinstance(other, Tensor) and (other.shape, other.stride()) == (parameter.shape, parameter.stride())
            ]
            units.append(tuple(as_it_lies(tensor.detach()) for tensor in (parameter, *alike)))
    return units


def _fill(pairs: Sequence[tuple[Outline, Tensor]], world: World, root: int) -> None:
    """Fill each tensor with that of rank `root`, by way of a copy where it does not lie as its outline says."""
    is_root = world.place.rank == root
    both = [(tensor, tensor if outline.fits(tensor) else outline.empty(tensor.device)) for outline, tensor in pairs]
    travelling, apart = [copy for _, copy in both], [pair for pair in both if pair[0] is not pair[1]]
    if is_root:
        for tensor, copy in apart:
            copy.copy_(tensor)
    others = world.place.size - 1
    what = f"sending the state to {others} {'rank' if others == 1 else 'ranks'}"
    told = _Told(sum(tensor.nbytes for tensor in travelling), what) if is_root else unwatched
    world.broadcast_tensors(travelling, root, told)
    if not is_root:
        for tensor, copy in apart:
            tensor.copy_(copy)


class _Told:
    """Tells the user at a calm pace how much of the state has been sent, if that takes longer than a moment."""

    def __init__(self, num_bytes: int, what: str) -> None:
        self._num_bytes, self._sent, self._what = num_bytes, 0, what
        self._begun = time.monotonic()
        self._next = self._begun + _QUIET_S

    def __call__(self, num_bytes: int) -> None:
        self._sent += num_bytes
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _EVERY_S
            unit, name = (1e9, "GB") if self._num_bytes >= 1e9 else (1e6, "MB")
            sent, whole = (f"{count / unit:.{1 if name == 'GB' else 0}f}" for count in (self._sent, self._num_bytes))
            say(f"{self._what}: {sent} of {whole} {name} after {now - self._begun:.0f} s")


def _outlined(value: Any) -> Any:
    """Return nested values with an outline in the place of every tensor."""
    if isinstance(value, Tensor):
        return Outline.of(value)
    if isinstance(value, Mapping):
        return {name: _outlined(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_outlined(item) for item in value])
    return value


def _with_room(outline: Any, optimizer: Optimizer) -> dict[str, Any]:
    """Return the outline of an optimizer's state with tensors: its own, so that nothing is allocated anew, or empty."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {}
    for index, values in outline["state"].items():
        own = parameters[index] if index < len(parameters) else torch.empty(0)
        state[index] = _filled(values, optimizer.state.get(own), own.device)
    return {"state": state, "param_groups": _filled(outline["param_groups"], None)}


def _filled(outline: Any, own: Any, device: torch.device | str = "cpu") -> Any:
    """Return nested outlines as tensors: those in the same place of `own` that fit, else empty ones.

    Those of tensors on the host are on the host, others on `device`.
    """
    if isinstance(outline, Outline):
        return own if outline.fits(own) else outline.empty("cpu" if outline.on_host else device)
    if isinstance(outline, Mapping):
        mine = own if isinstance(own, Mapping) else {}
        return {name: _filled(item, mine.get(name), device) for name, item in outline.items()}
    if isinstance(outline, (list, tuple)):
        return type(outline)([_filled(item, None, device) for item in outline])
    return outline


def _pairs(outline: Any, live: Any) -> Iterator[tuple[Outline, Tensor]]:
    """Yield each outline in nested values with the tensor that is in its place in `live`."""
    if isinstance(outline, Outline):
        yield outline, live
    elif isinstance(outline, Mapping):
        for name, item in outline.items():
            yield from _pairs(item, live[name])
    elif isinstance(outline, (list, tuple)):
        for item, other in zip(outline, live, strict=True):
            yield from _pairs(item, other)
