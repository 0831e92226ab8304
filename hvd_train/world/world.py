"""The operations between the ranks of a run, and the world of one rank."""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_train.errors import HvdTrainError, RankLost, UsageError, may_travel
from hvd_train.launch import roll_call

T = TypeVar("T")
PendingSum = Callable[[], Tensor]
"""A sum that has begun: calling it waits for the sum and returns it."""
Request = Literal["train", "change", "stop"]
"""Train, form another world because hosts came or went, or stop."""

_EXCHANGE_S = 1.0


@may_travel
@dataclass(frozen=True)
class Place:
    """The place of a process among the ranks; by default, of a single rank."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # decides the GPU
    local_size: int = 1


@dataclass(frozen=True)
class Gradients:
    """The gradients of all parameters, summed over all ranks."""

    tensors: list[Tensor]  # share the memory of the gradients, and hold nothing else but zeros
    squares: float | None = None  # the sum of the squares of all numbers, if it is known


class World:
    """Processes that train one model. All ranks call the operations in the same order.

    An operation in which ranks communicate raises RankLost if another rank has ended or cannot be reached. Here the
    group has one rank, so each operation is an identity; `HorovodWorld` overrides most of them.
    """

    place: Place = Place()
    """The place of this process, which changes in each new world."""

    def start_sum(self, tensor: Tensor, name: str) -> PendingSum:
        """Begin to sum `tensor` over all ranks, which pass tensors of the same shape and type.

        `name`, the same on all ranks, distinguishes concurrent sums. The result may share memory with `tensor`.
        """
        return lambda: tensor

    def sum(self, tensor: Tensor, name: str) -> Tensor:
        """Sum `tensor` over all ranks as `start_sum` does, wait, and return the result."""
        return self.start_sum(tensor, name)()

    def broadcast(self, value: T, root: int) -> T:
        """Return rank `root`'s `value`, sent as a pickle; tensors in it must be on the CPU."""
        return value

    def broadcast_tensors(self, tensors: Sequence[Tensor], root: int) -> None:
        """Fill the `tensors` of every rank from rank `root`.

        All ranks pass the same number of tensors, of the same shapes, types and orders in memory, without gaps.
        After a RankLost the tensors of other ranks may hold any mixture of their own values and the root's.
        """

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks in their order, pickled as in `broadcast`; one operation carries them."""
        return [value]

    def wrap(self, optimizer: Optimizer, model: nn.Module, compression: str = "none") -> Optimizer:
        """Return an optimizer for `model` whose backward passes reduce the gradients.

        The last backward pass of a step starts the reduction of each gradient as soon as it is ready. The `compression`
        is fp16, bf16 or none.
        """
        return optimizer

    def regroup(self, optimizer: Optimizer) -> None:
        """Update, between two steps, which parameters of a wrapped optimizer require a gradient."""

    def expect_passes(self, optimizer: Optimizer, passes: int) -> None:
        """Set the number of backward passes in the next step; the last starts the reduction."""

    @contextmanager
    def reduced(self, optimizer: Optimizer) -> Iterator[Gradients]:
        """Wait for all ranks; inside the block each gradient is the sum. A missing one is zeros."""
        yield complete_gradients(optimizer)

    def prepare(self, build: Callable[[], T]) -> T:
        """Return the value of `build`, which each rank calls before the rendezvous of an elastic job.

        In a fixed world all ranks raise the HvdTrainError that `build` raises on any of them. In an elastic one each
        rank raises only its own, so that a newcomer's error does not end the others.
        """
        return together(self, build)

    def compare(self, facts: Mapping[str, str]) -> None:
        """Raise UsageError on all ranks if these values, by name, differ between them.

        A worker that joins an elastic job is compared when it joins, and alone raises the error.
        """
        who = f"rank {self.place.rank} ({socket.gethostname()})"
        if difference := roll_call.disagreement(self.gather({"who": who, **facts})):
            raise UsageError(difference)

    def meet(self, sync: Callable[[], None] = lambda: None, after: RankLost | None = None) -> None:
        """Meet the other ranks, and call `sync`, which synchronizes them.

        In an elastic job the ranks meet again, with another `place`, `after` each RankLost and whenever all ranks call
        this again; `sync` is called until it raises no RankLost. Raises: RankLost: `after` in a fixed world, and if no
        other world can form.
        """
        if after is not None:
            raise after
        sync()

    def leave(self, *, failed: bool) -> None:
        """Say that this rank trains no more, though it may still write files; if it `failed`, nobody waits for it."""

    def requested(self, *, got_signal: bool = False) -> Request:
        """Return what the job asks of this rank, without waiting: it is called before each step.

        `got_signal` says that this rank got a signal. A fixed world stops then. An elastic job continues without this
        rank, unless all ranks got one.
        """
        return "stop" if got_signal else "train"

    def close(self) -> None:
        """Leave the world. No operation may follow."""


class LocalWorld(World):
    """The world of one rank. It needs no Horovod."""


def complete_gradients(optimizer: Optimizer) -> Gradients:
    """Return the gradients of all parameters. Missing ones become zeros, as in Horovod: weight decay acts on them."""
    gradients = list[Tensor]()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
    return Gradients(gradients)


def together(world: World, build: Callable[[], T]) -> T:
    """Return the value of `build` on this rank, once it has succeeded on all.

    Raises: HvdTrainError: on every rank, the error of the lowest rank that raised one.
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


def result_of_rank_0(world: World, work: Future[T]) -> T:
    """Return the result of rank 0's `work` on every rank; other ranks' work is ignored.

    Ranks communicate every second meanwhile. Raises: RankLost: if a rank is lost, on rank 0 with the work under way.
    """
    while True:
        if world.place.rank == 0:
            wait([work], timeout=_EXCHANGE_S)
        done, result = world.broadcast((True, work.result()) if work.done() else (False, None), 0)
        if done:
            return result  # type: ignore[return-value]  # of work that is done
