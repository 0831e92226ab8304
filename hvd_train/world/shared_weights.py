"""One copy of the weights and of the optimizer's numbers for all ranks of a host, in memory that they share.

Each rank computes with the same weights, and puts its gradients where the others read them. Then each sums the
gradients of its shard of the weights, and updates it (as in ZeRO: Rajbhandari et al., arXiv 1910.02054). A step is
taken by all ranks of the host or by none: a rank that ends in the middle leaves what the others need to do its part.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from hvd_train.console import say
from hvd_train.errors import RankLost
from hvd_train.progress.whereabouts import here
from hvd_train.world.gradient import Gradient
from hvd_train.world.host_memory import HostMemory, fence
from hvd_train.world.shard_update import ChunkUpdate, DescentInC, Shard, ShardUpdate, UpdateByChunks, update_word
from hvd_train.world.shards import Chunk, Layout, elements_of
from hvd_train.world.step_in_c import Build, Parts, Rounding, is_available
from hvd_train.world.wire import as_it_lies, has_no_gaps

_CHUNK = 1 << 18  # elements: what is read and written for one of them fits into the cache of a core
_ROW = 8  # words of a shard: a line of the cache, since each is written by another rank
_SUMMED, _LEFT, _AT, _NORM = range(4)
_FLOAT = 4  # bytes
_STEP = "step"  # how torch's optimizers name the number of steps of a parameter, which all its elements share
_SPINS, _PAUSE_S = 200, 50e-6
_LOOK_S = 0.01  # from one look for ranks that have ended to the next
_SILENT_S = 60.0  # an update takes milliseconds: a rank that has stood still for so long in one is stopped, or hangs
_SLOW_S = 600.0  # but before its sums a rank may wait for images: as long as Horovod waits for one that does not come


class Plan:
    """How the memory is cut: the words of the shards, then numbers, of which each kind has a place per element."""

    def __init__(self, optimizer: Optimizer, ranks: int) -> None:
        """The optimizer has numbers for all its parameters (`give_numbers`)."""
        self.ranks = ranks
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.layout = Layout([parameter.numel() for parameter in self.parameters])
        self.kinds = sorted({kind for p in self.parameters for kind in _kinds(optimizer, p)})
        """The names of the optimizer's numbers that each weight has."""
        self._begin = ranks * _ROW * 8
        self._of_log = (1 + len(self.kinds)) * _log_elements(self.layout)
        self._row = self.layout.num_elements * _FLOAT
        self._logs_begin = self._begin + self._row * (1 + len(self.kinds) + ranks)

    @property
    def num_bytes(self) -> int:
        """How much memory is needed."""
        return self._logs_begin + self.ranks * self._of_log * _FLOAT

    def row(self, memory: HostMemory, number: int) -> Tensor:
        """Return a place for each element: 0 the weights, then each kind, then the gradients of each rank."""
        return memory.numbers(self._begin + number * self._row, self.layout.num_elements)

    def log(self, memory: HostMemory, shard: int) -> Tensor:
        """Return where the numbers of one chunk of a shard are kept while they are updated."""
        return memory.numbers(self._logs_begin + shard * self._of_log * _FLOAT, self._of_log)


class SharedWeights:
    """The weights of an optimizer, in common memory, and what one rank does in each step."""

    def __init__(
        self,
        memory: HostMemory,
        plan: Plan,
        rank: int,
        optimizer: Optimizer,
        build: Build,
        rounding: Rounding | None = None,
    ) -> None:
        """`rank` counts the ranks of this host. The ranks have equal weights; `move_in` follows on all of them.

        With a `rounding`, the same on all ranks, steps are taken in C.
        """
        self._memory, self._plan, self._rank, self._optimizer, self._build = memory, plan, rank, optimizer, build
        self._rounding = rounding
        self._words = memory.words(0, plan.ranks, _ROW, np.int64)
        self._norms = memory.words(0, plan.ranks, _ROW, np.float64)[:, _NORM]
        self._weights = plan.row(memory, 0)
        self._numbers = {kind: plan.row(memory, 1 + place) for place, kind in enumerate(plan.kinds)}
        self._of_ranks = [plan.row(memory, 1 + len(plan.kinds) + number) for number in range(plan.ranks)]
        # Nobody reads again what is added up, so the sums of a shard take the place of another rank's gradients.
        self._place_of_sums = [1 if shard == 0 else 0 for shard in range(plan.ranks)]
        self._shards = [
            Shard(self._words[shard, _AT : _AT + 1], plan.log(memory, shard), self._of_ranks[place])
            for shard, place in enumerate(self._place_of_sums)
        ]
        self._gradients = [self._place(self._of_ranks[rank], number) for number in range(len(plan.parameters))]
        self._numbered = {parameter: number for number, parameter in enumerate(plan.parameters)}
        self._count = 0
        self._own: list[int] = []
        self._updates: dict[int, ShardUpdate] = {}
        self._flat: dict[int, Tensor] = {}  # gradients of which this rank sums a part, in the order of their weights
        self._steps: list[Tensor] = []

    def claim(self) -> None:
        """Take the lock of this rank's shard, which tells the others that it lives."""
        if not self._memory.lock(self._rank):
            raise OSError("another process has the lock of this rank's shard")
        self._own = [self._rank]

    def copy_in(self) -> None:
        """Copy this rank's part of weights and numbers into the common memory; the others copy the rest."""
        for number, parameter in enumerate(self._plan.parameters):
            if number % self._plan.ranks == self._rank:
                self._place(self._weights, number).copy_(parameter.detach())
                for kind, value in _kinds(self._optimizer, parameter).items():
                    self._place(self._numbers[kind], number).copy_(value)

    def move_in(self) -> None:
        """Work on the common memory from now on: all ranks have copied their parts."""
        for number, parameter in enumerate(self._plan.parameters):
            parameter.data = self._place(self._weights, number)
            for kind in _kinds(self._optimizer, parameter):
                self._optimizer.state[parameter][kind] = self._place(self._numbers[kind], number)

    def break_off(self) -> None:
        """Tell the other ranks of this host that this one does not take the step that they are about to take."""
        self._words[self._rank, _LEFT] = self._words[self._rank, _SUMMED] + 1

    def move_out(self) -> None:
        """Give this rank weights and numbers of its own again, and leave its shard to those that live."""
        self.break_off()
        for parameter in self._plan.parameters:
            parameter.data = parameter.data.clone()
            for kind, value in _kinds(self._optimizer, parameter).items():
                self._optimizer.state[parameter][kind] = value.clone()
        for shard in self._own:
            self._memory.unlock(shard)
        self._own = []

    def cut(self, trained: Sequence[Tensor]) -> None:
        """Cut the parameters that require a gradient now into shards, between two steps."""
        self._cut = self._plan.layout.shards([self._numbered[p] for p in trained], self._plan.ranks, _CHUNK)
        self._updates = {}
        groups = enumerate(self._optimizer.param_groups)
        self._group_of = {parameter: number for number, group in groups for parameter in group["params"]}
        states = [self._optimizer.state.get(parameter, {}) for parameter in trained]
        self._steps = [state[_STEP] for state in states if _STEP in state]
        self._elements = [elements_of(shard) for shard in self._cut]
        self._summed_here = self._elements[self._rank]
        begins, here = self._plan.layout.begins, self._summed_here.items()
        self._summed = Parts([(begins[number] + begin, begins[number] + end, 0, 0) for number, (begin, end) in here])

    def put(self, parameters: Sequence[Tensor]) -> None:
        """Put the gradients of parameters where the others read them, but for those that this rank itself sums.

        A parameter without a gradient has one of zeros.
        """
        places, gradients = list[Tensor](), list[Tensor]()
        for parameter in parameters:
            number = self._numbered[parameter]
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if number not in self._summed_here:
                places.append(self._gradients[number])
                gradients.append(gradient)
                parameter.grad = None
            else:
                begin, end = self._summed_here[number]
                flat = self._flat[number] = _in_order_of(parameter, gradient)
                place = as_it_lies(self._gradients[number])
                places += [place[:begin], place[end:]]
                gradients += [flat[:begin], flat[end:]]
        if places:
            torch._foreach_copy_(places, gradients)

    def sum(self) -> None:
        """Sum the gradients of this rank's shard, now that all ranks have put theirs."""
        self._count += 1
        fence()
        self._norms[self._rank] = self._sum_in_c() if is_available() else self._sum_by_torch()
        self._flat.clear()
        fence()
        self._words[self._rank, _SUMMED] = self._count

    def _sum_in_c(self) -> float:
        own = [self._flat[number][begin:end] for number, (begin, end) in self._summed_here.items()]
        return self._summed.sum(own, self._of_ranks, self._rank, self._place_of_sums[self._rank])

    def _sum_by_torch(self) -> float:
        place, norms = self._place_of_sums[self._rank], []
        for part in (part for chunk in self._cut[self._rank] for part in chunk.parts):
            begin = self._plan.layout.begins[part.parameter]
            rows = [row[begin + part.begin : begin + part.end] for row in self._of_ranks]
            total = rows[place]
            rows[self._rank] = self._flat[part.parameter][part.begin : part.end]
            torch.add(rows[0], rows[1], out=total)  # in the order of ranks, whoever sums
            for row in rows[2:]:
                total += row
            norms.append(torch.linalg.vector_norm(total))
        return math.hypot(*torch.stack(norms).tolist()) if norms else 0.0

    def norm(self) -> float:
        """Wait for the sums of all shards, and return the 2-norm of the whole gradient.

        From here on the step cannot break. Raises RankLost where a rank of this host has not come as far.
        """
        with here.waiting("the sums of this host"):
            self._wait(self._is_summed, self._give_up, _SLOW_S)
        return math.hypot(*self._norms.tolist())

    def update(self, factor: float | None) -> None:
        """Update this rank's shard by `factor` times the sum of the gradients, and wait for those of the others."""
        for shard in self._own:
            self._update_shard(shard, factor)
        with here.waiting("the updates of this host"):
            self._wait(self._is_updated, lambda shard: self._update_shard(shard, factor), _SILENT_S)
        if self._steps:
            torch._foreach_add_(self._steps, 1)

    def _update_shard(self, shard: int, factor: float | None) -> None:
        """Update what is left to do of a shard: all, unless the rank is gone that has begun."""
        self._update_of(shard).take(self._count, factor)

    def _give_up(self, shard: int) -> None:
        """Raise RankLost, as all ranks of this host do: a rank is gone, or has left, before it had its sums."""
        self._words[shard, _LEFT] = self._count
        raise RankLost("another rank of this host is gone, or has lost the others")

    def _is_summed(self, shard: int) -> bool:
        return int(self._words[shard, _SUMMED]) == self._count

    def _is_updated(self, shard: int) -> bool:
        # (By torch's optimizers as many as there are chunks: those of other shards are seldom needed.)
        chunks = len(self._cut[shard])
        num_pieces = chunks if self._rounding is None else self._update_of(shard).num_pieces
        return int(self._words[shard, _AT]) == update_word(self._count, num_pieces)

    def _wait(self, is_done: Callable[[int], bool], gone: Callable[[int], None], limit_s: float) -> None:
        """Wait until something is done for all shards; `gone` is called for one whose rank has ended or left.

        Where nothing happens for `limit_s` seconds the ranks are killed for which all wait: one that goes on with its
        shard while another one does so would spoil it.
        """
        waiting, spins, look_at = list(range(self._plan.ranks)), 0, time.monotonic() + _LOOK_S
        seen, changed_at = self._words.copy(), look_at
        while waiting := [shard for shard in waiting if not is_done(shard)]:
            spins += 1
            if spins < _SPINS:
                continue
            time.sleep(_PAUSE_S)
            now = time.monotonic()
            if now < look_at:
                continue
            look_at = now + _LOOK_S
            if not np.array_equal(seen, self._words):
                seen, changed_at = self._words.copy(), now
            hangs = now - changed_at > limit_s
            if hangs:
                changed_at = now
            for shard in waiting:
                if self._words[shard, _LEFT] == self._count:
                    gone(shard)
                elif self._memory.lock(shard):
                    self._own.append(shard)
                    fence()
                    if not is_done(shard):
                        gone(shard)
                elif hangs:
                    self._end(shard, limit_s)
        fence()

    def _end(self, shard: int, after_s: float) -> None:
        process = self._memory.holder(shard)
        if process is not None:
            say(f"process {process} has stood still for {after_s:.0f} s in the middle of a step: it is killed")
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _update_of(self, shard: int) -> ShardUpdate:
        if shard not in self._updates:
            if self._rounding is None:
                chunks = [self._chunk(shard, chunk) for chunk in self._cut[shard]]
                self._updates[shard] = UpdateByChunks(self._shards[shard], chunks)
            else:
                self._updates[shard] = self._descent(shard, self._rounding)
        return self._updates[shard]

    def _descent(self, shard: int, rounding: Rounding) -> DescentInC:
        """Return the update of a shard in C, in which each element is rounded as in its whole parameter."""
        layout, parameters, parts = self._plan.layout, self._plan.parameters, []
        for number, (begin, end) in self._elements[shard].items():
            group, first = self._group_of[parameters[number]], layout.begins[number]
            pieces = rounding.parts(begin, end, layout.sizes[number])
            parts += [(first + low, first + high, group, form) for low, high, form in pieces]
        groups = self._optimizer.param_groups
        return DescentInC(self._shards[shard], Parts(parts), groups, self._weights, self._numbers)

    def _chunk(self, shard: int, chunk: Chunk) -> ChunkUpdate:
        """Return a chunk with an optimizer of its own, whose parameters are parts of the common weights."""
        parameters, begins = self._plan.parameters, self._plan.layout.begins
        groups: list[tuple[dict[str, Any], list[Tensor]]] = [(group, []) for group in self._optimizer.param_groups]
        state, steps = {}, []
        for part in chunk.parts:
            parameter, begin = parameters[part.parameter], begins[part.parameter]
            here = slice(begin + part.begin, begin + part.end)
            weights = self._weights[here]
            weights.grad = self._shards[shard].sums[here]
            groups[self._group_of[parameter]][1].append(weights)
            state[weights] = {kind: self._numbers[kind][here] for kind in _kinds(self._optimizer, parameter)}
            whole = self._optimizer.state.get(parameter, {}).get(_STEP)
            if whole is not None:
                state[weights][_STEP] = whole.clone()
                steps.append((state[weights][_STEP], whole))
        used = [(group, parts) for group, parts in groups if parts]
        optimizer = self._build([{**group, "params": parts} for group, parts in used])
        optimizer.state.update(state)
        rows = [self._weights, *self._numbers.values()]
        changing = [row[begin:end] for row in rows for begin, end in chunk.spans]
        return ChunkUpdate(optimizer, [group for group, _ in used], changing, steps)

    def _place(self, row: Tensor, number: int) -> Tensor:
        """Return the place of parameter `number` in a row, in the shape and order of dimensions that it has."""
        parameter, begin = self._plan.parameters[number], self._plan.layout.begins[number]
        return row[begin : begin + parameter.numel()].as_strided(parameter.shape, parameter.stride())


class SharedGradient(Gradient):
    """The sums that lie in common memory, of which each rank has made a part."""

    def __init__(self, weights: SharedWeights) -> None:
        self._weights = weights

    def read(self, words: Tensor) -> tuple[list[float], float]:
        """Return the numbers, and the norm once all ranks of this host have their sums. Raises RankLost."""
        return words.tolist(), self._weights.norm()

    def take_step(self, factor: float | None) -> None:
        """Update the weights of this host together with its other ranks."""
        self._weights.update(factor)


def _in_order_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient flat, in the order in which the weights lie in memory."""
    if gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter).copy_(gradient)
    return as_it_lies(gradient)


def give_numbers(optimizer: Optimizer, build: Build) -> None:
    """Give each parameter the numbers that the optimizer's first step would make, as they are before it: zeros."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state.get(parameter):
                probe = torch.zeros(1)
                probe.grad = torch.zeros(1)
                other = build([{**group, "params": [probe]}])
                other.step()
                for name, value in other.state[probe].items():
                    if isinstance(value, Tensor):
                        like = parameter.detach() if value.shape == probe.shape else value
                        optimizer.state[parameter][name] = torch.zeros_like(like)


def can_be_shared(optimizer: Optimizer) -> bool:
    """Return whether all numbers are float32 without gaps in memory, on the CPU. `give_numbers` comes first."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return all(
        tensor.dtype == torch.float32
        and tensor.device.type == "cpu"
        and tensor.shape == parameter.shape
        and has_no_gaps(tensor)
        for parameter in parameters
        for tensor in (parameter, *_kinds(optimizer, parameter).values())
    )


def _kinds(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return, by name, what an optimizer keeps for each element of a parameter."""
    values = optimizer.state.get(parameter, {})
    return {name: value for name, value in values.items() if name != _STEP and isinstance(value, Tensor)}


def _log_elements(layout: Layout) -> int:
    """Return the most elements, with gaps, that the spans of a chunk have."""
    return min(layout.num_elements, _CHUNK + 16 * len(layout.sizes))
