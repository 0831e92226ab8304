"""Gradients in flat buckets, which Horovod's optimizer reduces in place, if possible in
memory that all ranks see.
"""

import contextlib
import inspect
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_train.console import say
from hvd_train.world.world import (
    ABSENT,
    DENSE,
    SPARSE,
    Gradients,
    World,
    kinds_of,
    kinds_on_all_ranks,
    numbers_in,
    real,
    sum_sparse,
)

_BUCKET_BYTES = 25 * 2**20  # a bucket is sent while the gradients of the next are computed
_LAST_BYTES = 4 * 2**20  # nothing is left to compute while the last bucket is sent
_ALIGNED = 64  # bytes; kernels for several tensors are faster if each begins at such an address


class Bucket(tuple[nn.Parameter, ...]):
    """Parameters of one type whose gradients share a flat tensor.

    Horovod takes it as one of its groups.
    """

    # The hash of a tuple would hash all parameters, each time that a gradient is ready.
    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def __init__(self, _: Sequence[nn.Parameter]) -> None:
        sizes = [math.ceil(p.numel() * p.element_size() / _ALIGNED) * _ALIGNED for p in self]
        self._begins = [
            sum(sizes[:number]) // self[0].element_size() for number in range(len(sizes))
        ]
        self._num_bytes_of_gradients = sum(sizes)
        self.num_bytes = self._num_bytes_of_gradients + _ALIGNED  # the last number is no gradient
        # the kinds of the gradients in the update before, over all ranks
        self._expected = [DENSE] * len(self)

    def place(self, memory: Tensor, wire: Callable[[Tensor], Tensor]) -> None:
        """Take this memory, zeros [`num_bytes`] uint8.

        Gradients in other memory stay there until `fill`. `wire` returns its numbers in the type
        in which ranks send them; itself, if that is theirs.
        """
        whole = memory.view(self[0].dtype)
        flat = whole[: self._num_bytes_of_gradients // self[0].element_size()]
        # Strides are those that autograd gives a gradient: the parameter's, unless they leave gaps.
        strides = [torch.empty_like(parameter, device="meta").stride() for parameter in self]
        self._views = [
            flat[begin : begin + parameter.numel()].as_strided(parameter.size(), stride)
            for parameter, begin, stride in zip(self, self._begins, strides, strict=True)
        ]
        self._whole, self.flat = map(real, (whole, flat))
        self.sent = wire(self._whole)
        """What is summed in place: the bucket, or its numbers in another type."""
        self._sent_views = self._views
        if self.is_cast:
            self._sent_views = [
                self.sent.as_strided(
                    view.size(), view.stride(), view.storage_offset() - self._whole.storage_offset()
                )
                for view in map(real, self._views)
            ]
        self.surprise = self.sent.view(-1)[-1:]
        """On CPUs above zero after the sum if, on any rank, gradients are of
        other kinds than expected."""

    @property
    def is_cast(self) -> bool:
        """Whether numbers are sent in another type than the gradients have."""
        return self.sent is not self._whole

    def collect(self) -> None:
        """Move the gradients that are in other memory into their views,
        which become the gradients.
        """
        self._move(self._views)

    def fill(self) -> bool:
        """Prepare to send: move the gradients into what is sent, and put zeros in place of
        missing ones; return whether any is a surprise.

        If they are cast for that, gradients have no value until `receive`.
        """
        kinds = kinds_of(self)
        self._move(self._sent_views)
        for sent, kind in zip(self._sent_views, kinds, strict=True):
            if kind != DENSE:
                sent.zero_()
        is_surprise = kinds != self._expected
        if self.surprise.device.type == "cpu":
            self.surprise.fill_(is_surprise)
        return is_surprise

    def _move(self, targets: Sequence[Tensor]) -> None:
        moved = [
            (parameter, view, real(parameter.grad), real(target))
            for parameter, view, target in zip(self, self._views, targets, strict=True)
            if _is_outside(parameter.grad, target)
        ]
        if moved:
            _, _, gradients, places = zip(*moved, strict=True)
            torch._foreach_copy_(places, gradients)
        for parameter, view, _, _ in moved:
            parameter.grad = view

    def receive(self) -> None:
        """Take the sums that have arrived as the gradients."""
        if self.is_cast:
            self._whole.copy_(self.sent)

    def settle(self, kinds: Sequence[int]) -> None:
        """Set the gradients of these kinds after the sum, and expect them in the next update."""
        # A sparse gradient is no part of the bucket, so it is a surprise each time.
        self._expected = [DENSE if kind == SPARSE else kind for kind in kinds]
        self.surprise.zero_()
        for parameter, view, kind in zip(self, self._views, kinds, strict=True):
            if kind == ABSENT:
                parameter.grad = None
            elif kind == DENSE:
                parameter.grad = view


def _is_outside(gradient: Tensor | None, place: Tensor) -> TypeGuard[Tensor]:
    return gradient is not None and gradient is not place and not gradient.is_sparse


class _Layout:
    """The buckets for an update of some parameters, and Horovod's optimizer over them.

    A hook of that optimizer on each parameter counts down the backward passes, then increments the
    count of its bucket, and sends the bucket if it is complete.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], ids: Sequence[int], horovod: Any
    ) -> None:
        """`parameters` are in the order of the model."""
        self.ids = ids  # of the parameters, in the order of the optimizers
        self.horovod = horovod
        self.buckets = in_buckets(parameters)
        horovod._groups = self.buckets
        horovod._p_to_group = {p: bucket for bucket in self.buckets for p in bucket}
        self.num_bytes = sum(bucket.num_bytes for bucket in self.buckets)
        self.is_placed = False  # in this world
        self.is_shared = False  # whether ranks of this world have tried to share memory for it

    def begin(self, passes: float) -> None:
        """Send each bucket in the last of these passes."""
        self.horovod._handles.clear()
        self.horovod._group_counts = dict.fromkeys(self.buckets, 0)
        self.horovod.set_backward_passes_per_step(passes)

    def end(self) -> None:
        """Send nothing any more: another layout may take over these parameters."""
        self.begin(math.inf)
        self.horovod._grad_accs.clear()  # its hooks stay while a graph of the program has them

    def place(self, memory: Tensor, wire: Callable[[Tensor], Tensor]) -> None:
        """Give the buckets this memory, zeros [`num_bytes`] uint8, as `Bucket.place` does."""
        sizes = [bucket.num_bytes for bucket in self.buckets]
        for bucket, piece in zip(self.buckets, torch.split(memory, sizes), strict=True):
            bucket.place(piece, wire)
        self.is_placed = True


class _Plain(torch.optim.SGD):
    """An optimizer for Horovod, which only needs its parameters."""

    # torch's own is in a wrapper whose first call imports the compiler, which takes a second
    add_param_group = inspect.unwrap(torch.optim.SGD.add_param_group)


class Reducer:
    """Sums the gradients of a model in buckets by Horovod's hooks.

    Horovod's optimizers take no steps.
    """

    def __init__(
        self,
        world: World,
        model: nn.Module,
        compression: Any,  # one of `hvd.Compression`
        distributed: Callable[[Optimizer, list[tuple[str, nn.Parameter]]], Any],
        start_sum: Callable[[Tensor, str], int],
        squares_at: Callable[[Tensor], float | None],
    ) -> None:
        """`distributed` returns what `hvd.DistributedOptimizer` of Horovod 0.28.1
        does for a plain optimizer.

        `start_sum` begins to sum a tensor in place over all ranks, under a name, and returns
        Horovod's handle. `squares_at` returns the sum of the squares of a tensor, if
        Horovod has added them up with the sums.
        """
        self._world = world
        self._model = model
        self._compression = compression
        self._start_sum = start_sum
        self._distributed = distributed
        self._squares_at = squares_at
        self._has_noted = False  # that sparse gradients are slow
        self._layouts: list[_Layout] = []

    def leave_world(self) -> None:
        """Send nothing any more.

        The next world begins as a newcomer does, which knows nothing of memory and of the kinds of
        gradients.
        """
        for layout in self._layouts:
            layout.end()
        self._layouts.clear()

    def begin(self, parameters: Sequence[nn.Parameter], passes: int) -> None:
        """Begin an update of these parameters in `passes` backward passes; the
        last one sends the gradients.

        Nothing is left of the update before, even if it was broken.
        """
        ids = [*map(id, parameters)]
        known = (layout for layout in self._layouts if layout.ids == ids)
        self._layout = next(known, None) or self._new_layout(ids)
        self._is_surprised = False  # on this rank
        for layout in self._layouts:
            # without any pass, `reduce` sends all gradients
            layout.begin(max(1, passes) if layout is self._layout else math.inf)
        layout = self._layout
        if layout.buckets and not layout.is_placed:
            num_bytes = layout.num_bytes
            device = layout.buckets[0][0].device
            layout.place(torch.zeros(num_bytes, dtype=torch.uint8, device=device), self._wire)

    def _new_layout(self, ids: list[int]) -> _Layout:
        """Return buckets for other parameters than before; an earlier layout
        of any of them is dropped.
        """
        mine = set(ids)
        for layout in self._layouts:
            if not mine.isdisjoint(layout.ids):
                layout.end()
        self._layouts = [layout for layout in self._layouts if mine.isdisjoint(layout.ids)]
        named = [(name, p) for name, p in self._model.named_parameters() if id(p) in mine]
        parameters = [parameter for _, parameter in named]
        with torch.enable_grad():
            plain = _Plain([{"params": parameters}], lr=0.0)
            horovod = self._distributed(plain, named)
        horovod._grouped_allreduce_grad_async = self._send
        self._layouts.append(_Layout(parameters, ids, horovod))
        return self._layouts[-1]

    def end_pass(self) -> None:
        """Let the gradients of further passes add up in the buckets."""
        for bucket in self._layout.buckets:
            bucket.collect()

    def reduce(self) -> Gradients:
        """Send the other gradients, wait until each one is the sum over all ranks, and return them.

        Horovod would send a bucket that lacks a gradient on this rank one parameter at a time,
        while other ranks send it whole. So missing gradients are filled with zeros here.
        """
        layout = self._layout
        handles = layout.horovod._handles
        for bucket in layout.buckets:
            if bucket not in handles:
                for parameter in bucket:
                    handles.pop(parameter, None)
                handles[bucket] = self._send(bucket)
        if not layout.buckets:
            return Gradients([])
        # To read a number from a GPU would wait for it, so that of all buckets is summed in host
        # memory there.
        is_on_cpu = layout.buckets[0].surprise.device.type == "cpu"
        of_ranks = (
            None
            if is_on_cpu
            else self._world.start_sum(torch.tensor([float(self._is_surprised)]), "kinds")
        )
        layout.horovod.synchronize()
        for bucket in layout.buckets:
            bucket.receive()
        surprises = (
            torch.cat([bucket.surprise for bucket in layout.buckets])
            if of_ranks is None
            else of_ranks()
        )
        gradients = self._summed(layout, is_surprised=any(surprises.tolist()))
        if not layout.is_shared:
            # All ranks communicate for it. They are here with the same parameters, which they may
            # not be in `begin`.
            self._share_memory(layout)
        return gradients

    def _summed(self, layout: _Layout, *, is_surprised: bool) -> Gradients:
        tensors = [bucket.flat for bucket in layout.buckets]
        if is_surprised:
            return Gradients(tensors + self._settle(layout.buckets))
        squares = [self._squares_at(bucket.sent) for bucket in layout.buckets]
        known = [of_bucket for of_bucket in squares if of_bucket is not None]
        return Gradients(tensors, sum(known) if len(known) == len(squares) else None)

    def _settle(self, buckets: Sequence[Bucket]) -> list[Tensor]:
        """Agree with all ranks on the kinds of the gradients, and return the
        numbers of the sparse ones.
        """
        parameters = [parameter for bucket in buckets for parameter in bucket]
        kinds = kinds_on_all_ranks(self._world, parameters)
        sparse = [
            parameter for parameter, kind in zip(parameters, kinds, strict=True) if kind == SPARSE
        ]
        if sparse and not self._has_noted and self._world.place.rank == 0:
            name = self._layout.horovod._parameter_names[sparse[0]]
            say(
                f"the gradient of {name} is sparse: ranks exchange its rows apart, which "
                "is slow for many rows"
            )
            self._has_noted = True
        for parameter in sparse:
            sum_sparse(self._world, parameter)
        of_buckets = iter(kinds)
        for bucket in buckets:
            bucket.settle([next(of_buckets) for _ in bucket])
        return [numbers_in(parameter) for parameter in sparse]

    def _send(self, bucket: Bucket) -> tuple[int, Sequence[Any]]:
        self._is_surprised = bucket.fill() or self._is_surprised
        name = self._layout.horovod._parameter_names[bucket[0]]
        return self._start_sum(bucket.sent, name), ()  # there is nothing for Horovod to decompress

    def _wire(self, numbers: Tensor) -> Tensor:
        """Return these numbers in the type on the wire."""
        sent: Tensor = self._compression.compress(numbers)[0]
        return sent

    def _share_memory(self, layout: _Layout) -> None:
        """Place the buckets of later updates on CPUs in memory of which the ranks
        of a host see each other's.
        """
        layout.is_shared = True
        first = layout.buckets[0][0]
        sums_in_place = first.device.type == "cpu" and self._wire(first) is first
        memory = self._world.share(layout.num_bytes) if sums_in_place else None
        if memory is not None:
            layout.place(memory, self._wire)


def in_buckets(parameters: Sequence[nn.Parameter]) -> list[Bucket]:
    """Return buckets of `parameters`, the last first: of 25 MB and at last a small one."""
    sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
    buckets: list[list[nn.Parameter]] = []
    size = _BUCKET_BYTES
    left = sum(sizes)
    for parameter, its_size in zip(reversed(parameters), reversed(sizes), strict=True):
        if (
            size >= _BUCKET_BYTES
            or left <= _LAST_BYTES < left + size
            or buckets[-1][-1].dtype != parameter.dtype
        ):
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += its_size
        left -= its_size
    return [Bucket(bucket) for bucket in buckets]


def memory_of_ranks(world: World, num_bytes: int) -> list[Tensor]:
    """Return memory of each rank, [num_bytes] uint8, which begins as zeros; an empty list if
    a rank cannot see it all.

    It has no name in a file system, and the kernel frees it with the last tensor of all ranks.
    Waits for all ranks.
    """
    of_ranks = []
    with contextlib.ExitStack() as files:
        number = -1
        with contextlib.suppress(OSError):
            file = os.memfd_create("hvd_train")
            files.callback(os.close, file)
            # if memory is limited, this fails, and not a later write
            os.posix_fallocate(file, 0, num_bytes)
            number = file
        for process, its_number in world.gather((os.getpid(), number)):
            with contextlib.suppress(RuntimeError):
                path = f"/proc/{process}/fd/{its_number}"
                of_ranks.append(
                    torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
                )
        complete = all(world.gather(len(of_ranks) == world.place.size))
    return of_ranks if complete else []
