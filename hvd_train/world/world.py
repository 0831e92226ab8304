"""The processes of a run: the place of each, the operations of a `World`, and the world of one.

Everything above this room is written against `World`; `horovod_world` implements it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_train.errors import HvdTrainError, RankLost, UsageError
from hvd_train.launch import roll_call
from hvd_train.travel import may_travel

T = TypeVar("T")
PendingSum = Callable[[], Tensor]
"""A sum that has begun: calling it waits for the sum and returns it."""
Request = Literal["train", "change", "stop"]
"""What the job asks of its ranks: to train, to form another world because hosts came or went, or to stop."""

_EXCHANGE_S = 1.0


@may_travel
@dataclass(frozen=True)
class Place:
    """The place of a process among the ranks of its world. The default is the place of a single rank."""

    rank: int = 0
    """Its number, from 0 to `size` - 1."""
    size: int = 1
    """The world size: how many ranks there are."""
    local_rank: int = 0
    """Its number among the ranks of its host, which decides its GPU."""
    local_size: int = 1
    """How many ranks its host has."""
    cross_rank: int = 0
    """The number of its host, among the hosts that have a rank with this local rank."""


@dataclass(frozen=True)
class Reduction:
    """How the gradients of all ranks are reduced."""

    fp16_wire: bool = False
    """Gradients travel as fp16."""
    adasum: bool = False
    """Gradients are not summed but combined by Adasum (Maleki et al., arXiv 2006.02924)."""
    predivide: float = 1.0
    """Gradients are divided by this before they are summed, and multiplied by it afterwards."""
    groups: int | None = None
    """The number of groups in which gradients travel; None makes groups of about 25 MB."""


class DriverLost(RankLost):
    """Raised in an elastic job whose driver is lost, so that no other world can form."""


class WorldChanged(Exception):
    """Raised by all ranks after the same step, to leave the body of `World.run` for another world."""


def already_in_sync() -> None:
    """Do nothing: the `sync` of `World.run` if ranks have no state to synchronize."""


def unwatched(num_bytes: int) -> None:
    """Do nothing: the `arrived` of `World.broadcast_tensors` if no caller counts."""


class World:
    """A group of processes that train one model. Every rank calls each operation in the same order.

    In this class itself the group has one rank, so each operation is an identity. `HorovodWorld` overrides all of them.

    Every operation in which ranks communicate raises RankLost if another rank has ended or cannot be reached.
    """

    place: Place = Place()
    """The place of this process; another value in each new world of `run`."""

    def start_sum(self, tensor: Tensor, name: str) -> PendingSum:
        """Begin to sum `tensor` over all ranks, which pass tensors of the same shape and type.

        `name` is the same on all ranks and distinguishes sums that are under way at once. The result may share memory
        with `tensor`.
        """
        return lambda: tensor

    def sum(self, tensor: Tensor, name: str) -> Tensor:
        """Sum `tensor` over all ranks as `start_sum` does, wait, and return the result."""
        return tensor

    def broadcast(self, value: T, root: int) -> T:
        """Return on every rank the `value` of rank `root`; the values of other ranks are ignored.

        The value is pickled; tensors in it must be on the CPU. A large one is better sent by `broadcast_tensors`.
        """
        return value

    def broadcast_tensors(
        self, tensors: Sequence[Tensor], root: int, arrived: Callable[[int], None] = unwatched
    ) -> None:
        """Fill the `tensors` of every rank from rank `root`, whatever their total size, without a copy.

        All ranks pass the same number of tensors, of the same shapes, types and orders in memory, without gaps. Tensors
        on GPUs are sent through host memory. `arrived` is called with the number of further bytes that have arrived.
        After a RankLost the tensors of the other ranks may hold any mixture of their own values and the root's.
        """

    def gather(self, value: T) -> list[T]:
        """Return on every rank the values of all ranks, in the order of ranks, pickled as in `broadcast`."""
        return [value]

    def wrap(self, optimizer: Optimizer, model: nn.Module, reduction: Reduction) -> Optimizer:
        """Return the optimizer to use in place of `optimizer`; backward passes through `model` reduce its gradients.

        The last backward pass of a step starts the reduction of each gradient as soon as it is ready. Raises
        UsageError if these ranks do not support the reduction.
        """
        return optimizer

    def regroup(self, optimizer: Optimizer) -> None:
        """Update, between two steps, which parameters of a wrapped optimizer require a gradient."""

    def expect_passes(self, optimizer: Optimizer, passes: int) -> None:
        """Set how many backward passes this rank makes in the next step, of which the last starts the reduction."""

    def sum_with_gradients(self, optimizer: Optimizer, tensor: Tensor) -> PendingSum:
        """Begin to sum `tensor` over all ranks together with the gradients of this step.

        Called at most once in a step, before its last backward pass; the result may be waited for inside `reduced`
        only, and may share memory with `tensor`.
        """
        return self.start_sum(tensor, "step")

    @contextmanager
    def reduced(self, optimizer: Optimizer) -> Iterator[None]:
        """Wait for the gradients of all ranks. Inside the block each gradient is their sum, and a step may be taken.

        A trained parameter that has no gradient on this rank counts as zeros, and has a gradient inside the block.
        """
        fill_missing_gradients(optimizer)
        yield

    def prepare(self, build: Callable[[], T]) -> T:
        """Return the value of `build`, called on this rank alone, before the rendezvous of an elastic job.

        In a fixed world all ranks raise the HvdTrainError that `build` raises on any of them. In an elastic one each
        rank raises only its own, so that a newcomer's error does not end the others.
        """
        return build()

    def compare(self, facts: Mapping[str, str]) -> None:
        """Raise UsageError on all ranks if these values, by name, are not the same on all of them.

        A worker that joins an elastic job is compared with the others when it joins, and alone raises the error.
        """
        if difference := roll_call.disagreement(self.gather({"host": socket.gethostname(), **facts})):
            raise UsageError(difference)

    def run(self, body: Callable[[], T], sync: Callable[[], None] = already_in_sync) -> T:
        """Call `sync`, in which all ranks synchronize their state, then `body`, and return the value of `body`.

        In an elastic job both are called again in each new world: after a RankLost, and after a WorldChanged that all
        ranks have raised after the same step. `place` has changed by then.
        """
        sync()
        return body()

    def timeline(self, path: Path | None) -> None:
        """Start recording on rank 0 which tensors are sent and when, in a file of Horovod's; with None, stop it.

        Does nothing if HOROVOD_TIMELINE was not DYNAMIC at the start of Horovod, which alone knows what is sent while
        the ranks compute.
        """

    def requested(self, *, told_to_end: bool = False) -> Request:
        """Return what the job asks of this rank. Neither waits nor communicates: it is called before each step.

        `told_to_end`: whether a signal has asked this rank to end. In a fixed world all ranks stop then. An elastic job
        continues without this rank, unless a signal has asked all of its ranks.
        """
        return "stop" if told_to_end else "train"

    def transport(self, device: torch.device) -> str:
        """Return the names of the libraries that sum tensors on `device`, for records of measurements."""
        return "none"

    def close(self) -> None:
        """Leave the world. No operation may follow."""


class LocalWorld(World):
    """The world of one rank. It needs no Horovod."""


def fill_missing_gradients(optimizer: Optimizer) -> None:
    """Give a gradient of zeros to each parameter that requires one and is not part of the loss.

    Horovod reduces such gradients as zeros, so weight decay acts on their parameters; a single rank must do the same.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def together(world: World, build: Callable[[], T]) -> T:
    """Return the value of `build` on this rank, once it has succeeded on all.

    Raises on every rank the HvdTrainError of the lowest rank that raised one.
    """
    value: T | None = None
    error: HvdTrainError | None = None
    try:
        value = build()
    except HvdTrainError as raised:
        error = raised
    for first in world.gather(error):
        if first is not None:
            raise first
    return value  # type: ignore[return-value]  # without an error it is a T


def barrier(world: World) -> None:
    """Wait until every rank has called this."""
    world.gather(None)


def result_of_rank_0(world: World, work: Future[T]) -> T:
    """Wait until rank 0's `work` is done, and return its result on every rank; the work of other ranks is ignored.

    Meanwhile ranks communicate every second, so the loss of any rank is found at once. Raises RankLost then, on rank 0
    with the work still under way.
    """
    while True:
        if world.place.rank == 0:
            wait([work], timeout=_EXCHANGE_S)
        done, result = world.broadcast((True, work.result()) if work.done() else (False, None), 0)
        if done:
            return result  # type: ignore[return-value]  # of work that is done
