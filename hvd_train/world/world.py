"""With whom a run is made: the frozen facts `Place`, the few operations of a `World`, and the world of one.

Everything above this module is written against `World`; what Horovod adds is in `horovod_world`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_train.errors import HvdTrainError

T = TypeVar("T")
Pending = Callable[[], Tensor]
Wish = Literal["train", "change", "stop"]


@dataclass(frozen=True)
class Place:
    """Where this process stands: `rank` of `size` in all, `local_rank` of `local_size` on its host."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0


@dataclass(frozen=True)
class Reduction:
    """How gradients become one over the ranks."""

    fp16_wire: bool = False
    """They travel as fp16."""
    adasum: bool = False
    """Not their sum, but Adasum of each rank's own gradient (Maleki et al., arXiv 2006.02924)."""
    predivide: float = 1.0
    """Divided by this before they are added, and multiplied after it."""
    groups: int | None = None
    """They travel in so many groups (None: in groups of about 25 MB)."""


class WorldChanged(Exception):
    """All ranks leave the body of `World.run` after the same step, to go on in another world."""


def stay() -> None:
    """The state is as it should be."""


class World(Protocol):
    """A group of processes that train one model. Every rank calls each operation in the same order.

    Raises RankLost from any operation when another rank has ended or cannot be reached.
    """

    place: Place

    def start_sum(self, tensor: Tensor, name: str) -> Pending:
        """Begin adding `tensor` (any shape, equal on all ranks) over the ranks; call the result to wait for it.

        `name` tells this sum from others under way; it is the same on all ranks.
        """

    def sum(self, tensor: Tensor, name: str) -> Tensor:
        """`start_sum` and wait."""

    def broadcast(self, value: T, root: int) -> T:
        """The `value` of rank `root`, on every rank. Tensors in it arrive on the CPU."""

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in the order of ranks, on every rank."""

    def wrap(self, optimizer: Optimizer, model: nn.Module, reduction: Reduction) -> Optimizer:
        """The optimizer whose gradients are reduced over the ranks as the last backward pass makes them.

        Raises UsageError where these ranks cannot do it in the way that is asked for.
        """

    def regroup(self, optimizer: Optimizer) -> None:
        """Say, between two steps, that other parameters of those it was wrapped with require a gradient now."""

    def expect_passes(self, optimizer: Optimizer, passes: int) -> None:
        """Say how many backward passes this rank makes in the next step, so that the last one starts the sums."""

    def sum_with_gradients(self, optimizer: Optimizer, tensor: Tensor) -> Pending:
        """`start_sum` of what travels best with this step's gradients; to be waited for inside `reduced`.

        Once a step, before its last backward pass.
        """

    def reduced(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Inside this block gradients are the sum over all ranks (0 for a parameter that had none)."""

    def prepare(self, build: Callable[[], T]) -> T:
        """What `build` makes on this rank from facts alone; where it fails on one rank, all raise that rank's error.

        In a world that can change each rank is alone with its error, so that a newcomer's is its own affair.
        """

    def run(self, body: Callable[[], T], enter: Callable[[], None] = stay) -> T:
        """Run `enter`, in which all ranks come to one state, and then `body`; the value of `body`.

        Where the world can change, both run again in each new one: after a RankLost, and after a WorldChanged that
        all ranks have raised after the same step. `place` is then another.
        """

    def timeline(self, path: Path | None) -> None:
        """Rank 0 writes down from here on what travels, and when, in a file (None: no more).

        Only the library itself knows what is under way while the ranks compute. It is not written where a run was
        not going to be profiled when its ranks met.
        """

    def heard(self) -> Wish:
        """What this rank has heard from outside: train on, go on in another world (hosts came or go), or stop."""

    def carrier(self, device: torch.device) -> str:
        """What sums of tensors on this device travel by, for whoever measures it: Gloo, MPI or NCCL."""

    def close(self) -> None:
        """Leave the group."""


class LocalWorld:
    """The world of one: the same operations, each an identity. It needs no Horovod."""

    def __init__(self) -> None:
        self.place = Place()

    def start_sum(self, tensor: Tensor, name: str) -> Pending:
        """The tensor as it is."""
        return lambda: tensor

    def sum(self, tensor: Tensor, name: str) -> Tensor:
        """The tensor as it is."""
        return tensor

    def broadcast(self, value: T, root: int) -> T:
        """The value as it is."""
        return value

    def gather(self, value: T) -> list[T]:
        """The one value there is."""
        return [value]

    def wrap(self, optimizer: Optimizer, model: nn.Module, reduction: Reduction) -> Optimizer:
        """The optimizer as it is: nothing travels, so there is nothing to compress."""
        return optimizer

    def regroup(self, optimizer: Optimizer) -> None:
        """Nothing is reduced."""

    def expect_passes(self, optimizer: Optimizer, passes: int) -> None:
        """Nothing to prepare."""

    def sum_with_gradients(self, optimizer: Optimizer, tensor: Tensor) -> Pending:
        """The tensor as it is."""
        return self.start_sum(tensor, "step")

    @contextmanager
    def reduced(self, optimizer: Optimizer) -> Iterator[None]:
        """Gradients are complete already; missing ones become zeros, as with more ranks."""
        fill_missing_gradients(optimizer)
        yield

    def prepare(self, build: Callable[[], T]) -> T:
        """Call it."""
        return build()

    def run(self, body: Callable[[], T], enter: Callable[[], None] = stay) -> T:
        """Call them."""
        enter()
        return body()

    def timeline(self, path: Path | None) -> None:
        """Nothing travels."""

    def heard(self) -> Wish:
        """Nothing: nobody is outside."""
        return "train"

    def carrier(self, device: torch.device) -> str:
        """Nothing travels."""
        return "none"

    def close(self) -> None:
        """Nothing to leave."""


def fill_missing_gradients(optimizer: Optimizer) -> None:
    """Give zeros to trained parameters that had no part in the loss.

    Horovod adds them over the ranks as zeros, so weight decay acts on them; one rank must do as many do.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def together(world: World, build: Callable[[], T]) -> T:
    """What `build` makes on each rank; where it fails on one, all stop with that rank's error."""
    value: T | None = None
    problem: HvdTrainError | None = None
    try:
        value = build()
    except HvdTrainError as error:
        problem = error
    first = next((p for p in world.gather(problem) if p is not None), None)
    if first is not None:
        raise first
    return value  # type: ignore[return-value]  # without a problem it is a T


def barrier(world: World) -> None:
    """Wait until every rank is here."""
    world.gather(None)
