"""The operations between the ranks of a run, and the world of one rank."""

import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hvd_train.errors import HvdTrainError, RankLost, UsageError, first_few, sendable
from hvd_train.launch import roll_call
from hvd_train.launch.workers import Request

T = TypeVar("T")
PendingSum = Callable[[], Tensor]
"""A sum that has begun: calling it waits for the sum and returns it."""

_EXCHANGE_S = 1.0


@sendable
@dataclass(frozen=True)
class Place:
    """The place of a process among the ranks; by default, of a single rank."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # decides the GPU
    local_size: int = 1


@dataclass(frozen=True)
class Gradients:
    """The gradients of an update, summed over all ranks."""

    # real; share the memory of the gradients, and hold nothing else but zeros
    tensors: list[Tensor]
    squares: float | None = None  # the sum of the squares of all numbers, if it is known


ABSENT, DENSE, SPARSE = range(3)
"""The kinds of a gradient: none, a tensor, or a sparse tensor."""


@dataclass
class Program:
    """The trainings of a program, one after another, which share a world."""

    begun: list[Any] = field(default_factory=list)  # what distinguishes each training
    ended: list[Any] = field(default_factory=list)  # the results of finished ones
    folder: Path | None = None  # holds the run folders of named trainings

    def begin_in(self, folder: Path) -> None:
        """Keep the folder of the first training for the others."""
        self.folder = self.folder or folder


class World:
    """Processes that train one model. All ranks call the operations in the same order.

    An operation in which ranks communicate raises RankLost if another rank has ended or cannot be
    reached. Here the group has one rank, so each operation is an identity; `HorovodWorld` overrides
    most of them.
    """

    place: Place = Place()
    """The place of this process, which changes in each new world."""
    _parameters: Sequence[nn.Parameter] = ()  # of the update

    @cached_property
    def program(self) -> Program:
        """The trainings of this process."""
        return Program()

    @property
    def joins_folder(self) -> Path | None:
        """The folder of the program, if others train in it and this rank has not met them yet."""
        return None

    def start_sum(self, tensor: Tensor, name: str) -> PendingSum:
        """Begin to sum `tensor` over all ranks, which pass tensors of the same shape and type.

        `name`, the same on all ranks, distinguishes concurrent sums. The result may share memory
        with `tensor`.
        """
        return lambda: tensor

    def sum(self, tensor: Tensor, name: str) -> Tensor:
        """Sum `tensor` over all ranks as `start_sum` does, wait, and return the result."""
        return self.start_sum(tensor, name)()

    def share(self, num_bytes: int) -> Tensor | None:
        """Return memory of this rank, zeros [num_bytes] uint8, in which sums need no copies.

        Returns None if not all ranks are on one host. Sums in the memory before it need copies
        again. Communicates.
        """
        return None

    def broadcast(self, value: T, root: int) -> T:
        """Return rank `root`'s `value`, sent as a pickle; tensors in it must be on the CPU."""
        return value

    def broadcast_tensors(self, tensors: Sequence[Tensor], root: int) -> None:
        """Fill the `tensors` of every rank from rank `root`.

        All ranks pass the same number of tensors, of the same shapes, types and orders in memory,
        without gaps. After a RankLost the tensors of other ranks may hold any mixture of their own
        values and the root's.
        """

    def gather(self, value: T, what: str = "another operation") -> list[T]:
        """Return the values of all ranks in their order, pickled as in `broadcast`;
        one operation carries them.

        Raises UsageError on all ranks if they give values for something else than this one, `what`
        says for the user what for.
        """
        return [value]

    def wrap(self, model: nn.Module, compression: str = "none") -> None:
        """Reduce the gradients of this model from now on.

        The `compression` is fp16, bf16 or none.
        """

    def begin_update(self, parameters: Sequence[nn.Parameter], passes: int) -> None:
        """Begin an update of `parameters`, all with a gradient to come, in `passes`
        backward passes of this rank.

        All ranks give the same parameters. The last pass starts the reduction of each gradient as
        soon as it is ready.
        """
        self._parameters = parameters

    def end_pass(self) -> None:
        """Note that a backward pass has ended, which is not the last one of the update."""

    def unwrap(self) -> None:
        """Undo `wrap`: backward passes reduce no gradients any more."""

    def reduce(self) -> Gradients:
        """Wait for all ranks, and return the gradients of the update; each one is
        now the sum over all ranks.

        A parameter that has no gradient on any rank has none afterwards, so that optimizers leave
        it alone. A sparse gradient stays sparse.
        """
        return own_gradients(self._parameters)

    def prepare(self, build: Callable[[], T]) -> T:
        """Return the value of `build`, which each rank calls before the
        rendezvous of an elastic job.

        In a fixed world all ranks raise the HvdTrainError that `build` raises on any of them. In an
        elastic one each rank raises only its own, so that a newcomer's error does not end the
        others.
        """
        return together(self, build)

    def compare(self, facts: Mapping[str, str], what: str = "its start") -> None:
        """Raise UsageError on all ranks if these values, by name, differ between them.

        A worker that joins an elastic job is compared when it joins, and alone raises the error.
        """
        who = f"rank {self.place.rank} ({socket.gethostname()})"
        if difference := roll_call.disagreement(self.gather({"who": who, **facts}, what)):
            raise UsageError(difference)

    def allow_wait(self, seconds: float) -> None:
        """Let ranks wait this long for one that waits for data; call it before they connect."""

    def watch(self, members: Sequence[tuple[str, int]]) -> None:
        """Let rank 0 say why ranks hang, if they do; `members` are host and process of each."""

    def meet(self, sync: Callable[[], None] = lambda: None, after: RankLost | None = None) -> None:
        """Meet the other ranks, and call `sync`, which synchronizes them.

        In an elastic job the ranks meet again, with another `place`, `after` each RankLost and
        whenever all ranks call this again; `sync` is called until it raises no RankLost. Raises:
        RankLost: `after` in a fixed world, and if no other world can form.
        """
        if after is not None:
            raise after
        sync()

    def join(self, sync: Callable[[], None] = lambda: None) -> None:
        """Call `sync` with the ranks that have met already, or meet them first.

        Raises as `meet` does.
        """
        self.meet(sync)

    def leave(self, *, failed: bool) -> None:
        """Say that this rank trains no more, though it may still write files; if it
        `failed`, nobody waits for it.
        """

    def requested(self, *, got_signal: bool = False) -> Request:
        """Return what the job asks of this rank, without waiting: it is called before each step.

        `got_signal` says that this rank got a signal. A fixed world stops then. An elastic job
        continues without this rank, unless all ranks got one.
        """
        return "stop" if got_signal else "train"

    def close(self) -> None:
        """Leave the world. No operation may follow."""


class LocalWorld(World):
    """The world of one rank. It needs no Horovod."""


class AloneWorld(LocalWorld):
    """The world of a rank that repeats alone what the other ranks of its job have finished."""

    def __init__(self, job: World) -> None:
        self.place = Place(local_rank=job.place.local_rank, local_size=job.place.local_size)
        self.program = job.program
        # with the other ranks, when it joins them
        self.compare = job.compare  # type: ignore[method-assign]


def own_gradients(parameters: Sequence[nn.Parameter]) -> Gradients:
    """Return the gradients that these parameters have."""
    return Gradients(
        [numbers_in(parameter) for parameter in parameters if parameter.grad is not None]
    )


def numbers_in(parameter: nn.Parameter) -> Tensor:
    """Return the numbers of a parameter's gradient, a real tensor that shares its memory."""
    assert parameter.grad is not None
    if parameter.grad.is_sparse:
        parameter.grad = parameter.grad.coalesce()
        return parameter.grad._values()
    return real(parameter.grad)


def real(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor, which share its memory: Horovod has no complex ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def kinds_of(parameters: Sequence[nn.Parameter]) -> list[int]:
    """Return the kind of the gradient of each parameter on this rank."""
    return [ABSENT if p.grad is None else SPARSE if p.grad.is_sparse else DENSE for p in parameters]


def kinds_on_all_ranks(world: World, parameters: Sequence[nn.Parameter]) -> list[int]:
    """Return the kind of each parameter's gradient over all ranks: sparse or dense if it
    is so on any. Communicates.
    """
    return [max(of_ranks) for of_ranks in zip(*world.gather(kinds_of(parameters)), strict=True)]


def sum_sparse(world: World, parameter: nn.Parameter) -> None:
    """Replace a sparse gradient by its sum over all ranks, which add its entries in the same order.

    Communicates.
    """
    mine = parameter.grad
    if mine is not None and not mine.is_sparse:
        mine = mine.to_sparse(1)
    entries = None
    if mine is not None:
        mine = mine.coalesce()
        entries = mine.indices().cpu(), mine.values().cpu()
    of_ranks = [given for given in world.gather(entries) if given is not None]
    places = torch.cat([indices for indices, _ in of_ranks], dim=1)
    values = torch.cat([values for _, values in of_ranks])
    summed = torch.sparse_coo_tensor(places, values, parameter.shape, check_invariants=False)
    parameter.grad = summed.to(parameter.device).coalesce()


def of_one_operation(given: Sequence[tuple[str, T]]) -> list[T]:
    """Return the values that ranks have given with what for. Raises UsageError if that differs."""
    if len({what for what, _ in given}) > 1:
        places = [f"rank {rank} is at {what}" for rank, (what, _) in enumerate(given)]
        raise UsageError(
            f"the ranks do different things: {first_few(places, 4)}. Every rank runs the same "
            "loops, updates and evaluations: a decision to stop or to skip one must be equal on all"
        )
    return [value for _, value in given]


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

    Ranks communicate every second meanwhile. Raises: RankLost: if a rank is lost, on rank 0 with
    the work under way.
    """
    while True:
        if world.place.rank == 0:
            wait([work], timeout=_EXCHANGE_S)
        done, result = world.broadcast((True, work.result()) if work.done() else (False, None), 0)
        if done:
            return result  # type: ignore[return-value]  # of work that is done
