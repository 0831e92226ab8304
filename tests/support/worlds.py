"""Worlds for tests: ranks as threads of one process, and faults and stops as data.

All threads share torch's default generator, so numbers from it (dropout, initial weights) differ
from run to run. Models for `ThreadWorld` use their own generator.
"""

import copy
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from hvd_train.errors import RankLost
from hvd_train.launch.workers import Request
from hvd_train.world.wire import MOST_BYTES, arrived, outgoing, packed, pieces, unpacked
from hvd_train.world.world import (
    DENSE,
    SPARSE,
    Gradients,
    LocalWorld,
    PendingSum,
    Place,
    World,
    kinds_on_all_ranks,
    numbers_in,
    of_one_operation,
    own_gradients,
    sum_sparse,
)

T = TypeVar("T")
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Fault:
    """Rank `rank` dies while the gradients of step `step` (from 1) are reduced."""

    rank: int
    step: int


class Killed(BaseException):
    """How a `Fault` ends its rank: like a kill, it passes every `except Exception`."""


@dataclass
class Meeting:
    """What the threads of a group share: each exchange's values until all ranks have taken them."""

    size: int
    faults: Sequence[Fault] = ()
    changed: threading.Condition = field(default_factory=threading.Condition)
    given: dict[tuple[str, int], dict[int, Any]] = field(default_factory=dict)
    taken: Counter[tuple[str, int]] = field(default_factory=Counter)
    lost: str | None = None

    def break_up(self, reason: str) -> None:
        """Raise RankLost in every rank that waits or calls later."""
        with self.changed:
            self.lost = self.lost or reason
            self.changed.notify_all()

    def give(self, key: tuple[str, int], rank: int, value: Any) -> None:
        with self.changed:
            if self.lost:
                raise RankLost(self.lost)
            self.given.setdefault(key, {})[rank] = value
            self.changed.notify_all()

    def take(self, key: tuple[str, int]) -> list[Any]:
        """Return the values of all ranks in their order, as soon as they are there."""
        end = time.monotonic() + DEADLINE_S
        with self.changed:
            while len(self.given[key]) < self.size:
                if self.lost:
                    raise RankLost(self.lost)
                if not self.changed.wait(end - time.monotonic()):
                    self.lost = (
                        f"ranks {sorted(set(range(self.size)) - set(self.given[key]))} "
                        f"did not come to {key}"
                    )
            values = [self.given[key][rank] for rank in range(self.size)]
            self.taken[key] += 1
            if self.taken[key] == self.size:
                del self.given[key], self.taken[key]
            return values


class ThreadWorld(World):
    """One rank of a group of threads.

    Sums are added in the order of ranks, so they are equal to the last bit.
    """

    most_bytes = MOST_BYTES

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.place = Place(rank, meeting.size, rank, meeting.size)
        self._meeting = meeting
        self._turns = Counter()
        self._compression = "none"
        self._steps = 0

    @override
    def start_sum(self, tensor: Tensor, name: str) -> PendingSum:
        key = self._give(f"sum {name}", tensor.detach().clone())

        def wait() -> Tensor:
            values = self._meeting.take(key)
            total = values[0].clone()
            for value in values[1:]:
                total += value
            return total

        return wait

    @override
    def broadcast(self, value: T, root: int) -> T:
        return self._exchange("broadcast", value if self.place.rank == root else None)[root]

    @override
    def broadcast_tensors(self, tensors: Sequence[Tensor], root: int) -> None:
        is_root = self.place.rank == root
        for piece in pieces(tensors, self.most_bytes):
            payload = self._exchange("tensors", outgoing(piece) if is_root else None)[root]
            if not is_root:
                arrived(piece, payload)

    @override
    def gather(self, value: T, what: str = "another operation") -> list[T]:
        return of_one_operation(self._exchange("gather", (what, value)))

    @override
    def wrap(self, model: nn.Module, compression: str = "none") -> None:
        self._compression = compression

    @override
    def reduce(self) -> Gradients:
        self._steps += 1
        parameters = self._parameters
        kinds = kinds_on_all_ranks(self, parameters)
        dense = [
            parameter for parameter, kind in zip(parameters, kinds, strict=True) if kind == DENSE
        ]
        for parameter in dense:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        tensors = [numbers_in(parameter) for parameter in dense]
        pending = [
            self.start_sum(self._to_wire(gradient), f"gradient {n}")
            for n, gradient in enumerate(tensors)
        ]
        if Fault(self.place.rank, self._steps) in self._meeting.faults:
            raise Killed(f"rank {self.place.rank} in step {self._steps}")
        for gradient, wait in zip(tensors, pending, strict=True):
            gradient.copy_(wait())
        for parameter, kind in zip(parameters, kinds, strict=True):
            if kind == SPARSE:
                sum_sparse(self, parameter)
        return own_gradients(parameters)

    def _to_wire(self, gradient: Tensor) -> Tensor:
        return gradient.to({"fp16": torch.half, "bf16": torch.bfloat16}.get(self._compression))

    def _give(self, name: str, value: Any) -> tuple[str, int]:
        key = (name, self._turns[name])
        self._turns[name] += 1
        self._meeting.give(key, self.place.rank, value)
        return key

    def _exchange(self, name: str, value: Any) -> list[Any]:
        # Copy, as between processes: no rank can change another rank's value.
        sent = unpacked(packed(value))
        return [copy.deepcopy(each) for each in self._meeting.take(self._give(name, sent))]


def run_ranks(
    size: int,
    body: Callable[[ThreadWorld], T],
    faults: Sequence[Fault] = (),
    kind: type[ThreadWorld] | None = None,
) -> list[T | Killed]:
    """Return the result of `body` on each of `size` ranks (Killed: a fault ended it),
    or raise the first error.
    """
    meeting = Meeting(size, faults)
    results = [None] * size
    errors = []

    def live(rank: int) -> None:
        try:
            results[rank] = body((kind or ThreadWorld)(rank, meeting))
        except Killed as error:
            results[rank] = error
            meeting.break_up(f"lost {error}")
        except BaseException as error:
            errors.append(error)
            meeting.break_up(f"lost rank {rank}: {error!r}")

    threads = [
        threading.Thread(target=live, args=(rank,), name=f"rank-{rank}", daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE_S)
    if errors:
        raise errors[0]
    alive = [thread.name for thread in threads if thread.is_alive()]
    assert not alive, f"still running: {alive}"
    return results


class StoppingWorld(LocalWorld):
    """A world of one whose launcher asks for a stop in a later step."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._left = after

    @override
    def requested(self, *, got_signal: bool = False) -> Request:
        self._left -= 1
        return "train" if self._left else "stop"


class StoppingRank(ThreadWorld):
    """A rank whose launcher asks for a stop in the fifth step."""

    _calls = 0

    @override
    def requested(self, *, got_signal: bool = False) -> Request:
        self._calls += 1
        return "stop" if self._calls == 5 else "train"


def own_generator(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw the model's weights from a separate generator; threads share torch's default one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.1
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model
