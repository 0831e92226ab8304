"""How the training state of one rank becomes that of all: its outline first, then its tensors, memory to memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hvd_train.console import say
from hvd_train.errors import UsageError
from hvd_train.network import optim
from hvd_train.state import Snapshot, TrainState, check_same_shapes, confirm_equal
from hvd_train.world.world import World, unwatched

_QUIET_S = 3.0  # a transfer that takes no longer is not worth a line
_EVERY_S = 10.0

# In this order: whatever loading an optimizer does to weights is undone by the weights that come after it.
_WITH_TENSORS = ("optimizer", "average", "model", "buffers")


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
    is_root = world.place.rank == root
    live = state.live()
    outline: Snapshot = world.broadcast(
        {**live, **{name: _outlined(live[name]) for name in _WITH_TENSORS}} if is_root else {}, root
    )
    if not is_root and keep:
        live = {**outline, **{name: _filled(outline[name], None, torch.device("cpu")) for name in _WITH_TENSORS}}
    elif not is_root:
        _make_room(state, outline)
        live = state.live()
        # Those in no state_dict may have another shape here, or be missing.
        device = next(state.model.parameters()).device
        live["buffers"] = [_filled(*both, device) for both in zip(outline["buffers"], live["buffers"], strict=True)]
    _fill([pair for name in _WITH_TENSORS for pair in _pairs(outline[name], live[name])], world, root)
    if not is_root and keep:
        state.load(live)
    elif not is_root:
        state.load_values(outline)
        state.load_buffers(live["buffers"])
    confirm_equal(state, world)


def _fill(pairs: Sequence[tuple[Outline, Tensor]], world: World, root: int) -> None:
    """Fill each tensor with that of rank `root`, by way of a copy where it does not lie as its outline says."""
    is_root = world.place.rank == root
    travelling = [tensor if outline.fits(tensor) else outline.empty(tensor.device) for outline, tensor in pairs]
    apart = [(tensor, copy) for (_, tensor), copy in zip(pairs, travelling, strict=True) if tensor is not copy]
    if is_root:
        for tensor, copy in apart:
            copy.copy_(tensor)
    told = _Told(sum(tensor.nbytes for tensor in travelling), world.place.size - 1) if is_root else unwatched
    world.broadcast_tensors(travelling, root, told)
    if not is_root:
        for tensor, copy in apart:
            tensor.copy_(copy)


class _Told:
    """Tells the user at a calm pace how much of the state has been sent, if that takes longer than a moment."""

    def __init__(self, num_bytes: int, num_ranks: int) -> None:
        self._num_bytes, self._sent = num_bytes, 0
        self._to = f"sending the state to {num_ranks} {'rank' if num_ranks == 1 else 'ranks'}"
        self._begun = time.monotonic()
        self._next = self._begun + _QUIET_S

    def __call__(self, num_bytes: int) -> None:
        self._sent += num_bytes
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _EVERY_S
            unit, name = (1e9, "GB") if self._num_bytes >= 1e9 else (1e6, "MB")
            sent, whole = (f"{count / unit:.{1 if name == 'GB' else 0}f}" for count in (self._sent, self._num_bytes))
            say(f"{self._to}: {sent} of {whole} {name} after {now - self._begun:.0f} s")


def _outlined(value: Any) -> Any:
    """Return nested values with an outline in the place of every tensor."""
    if isinstance(value, Tensor):
        return Outline.of(value)
    if isinstance(value, Mapping):
        return {name: _outlined(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_outlined(item) for item in value])
    return value


def _make_room(state: TrainState, outline: Snapshot) -> None:
    """Give the optimizer of `state` the values and the tensors, of any values yet, that `outline` says.

    Raises UsageError, before anything is changed, where the outline is of another model or optimizer.
    """
    for mine, theirs in ((state.model, outline["model"]), (state.average, outline["average"])):
        check_same_shapes({} if mine is None else mine.state_dict(), theirs or {})
    try:
        state.optimizer.load_state_dict(_with_room(outline["optimizer"], state.optimizer))
    except ValueError as error:
        raise UsageError(f"the state of the other ranks is of another optimizer: {error}") from None
    optim.match_memory_format(state.optimizer)


def _with_room(outline: Any, optimizer: Optimizer) -> dict[str, Any]:
    """Return the outline of an optimizer's state with tensors: its own, so that nothing is allocated anew, or empty."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {}
    for index, values in outline["state"].items():
        own = parameters[index] if index < len(parameters) else torch.empty(0)
        state[index] = _filled(values, optimizer.state.get(own), own.device)
    return {"state": state, "param_groups": _filled(outline["param_groups"], None, torch.device("cpu"))}


def _filled(outline: Any, own: Any, device: torch.device) -> Any:
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
