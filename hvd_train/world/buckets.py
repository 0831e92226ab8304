"""Gradients in flat buckets, which Horovod's optimizer reduces in place, if possible in memory that all ranks see."""

import contextlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hvd_train.world.world import Gradients, World

_BUCKET_BYTES = 25 * 2**20  # a bucket is sent while the gradients of the next are computed
_LAST_BYTES = 4 * 2**20  # nothing is left to compute while the last bucket is sent
_ALIGNED = 64  # bytes; kernels for several tensors are faster if each begins at such an address


class Bucket(tuple[nn.Parameter, ...]):
    """Parameters of one type whose gradients share a flat tensor. Horovod takes it as one of its groups."""

    # The hash of a tuple would hash all parameters, each time that a gradient is ready.
    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def __init__(self, _: Sequence[nn.Parameter]) -> None:
        sizes = [math.ceil(p.numel() * p.element_size() / _ALIGNED) * _ALIGNED for p in self]
        self._begins = [sum(sizes[:number]) // self[0].element_size() for number in range(len(sizes))]
        self.num_bytes = sum(sizes)

    def place(self, memory: Tensor) -> None:
        """Take this memory, zeros [`num_bytes`] uint8. Gradients in other memory stay there until `fill`."""
        self.flat = memory.view(self[0].dtype)
        # Strides are those that autograd gives a gradient: the parameter's, unless they leave gaps.
        strides = [torch.empty_like(parameter, device="meta").stride() for parameter in self]
        self.views = [
            self.flat[begin : begin + parameter.numel()].as_strided(parameter.size(), stride)
            for parameter, begin, stride in zip(self, self._begins, strides, strict=True)
        ]

    def fill(self) -> None:
        """Move each gradient into its view, which becomes the gradient; a missing one is zeros."""
        for parameter, view in zip(self, self.views, strict=True):
            if parameter.grad is None:
                parameter.grad = view.zero_()
        outside = [(view, p.grad) for p, view in zip(self, self.views, strict=True) if p.grad is not view]
        if outside:
            torch._foreach_copy_(*map(list, zip(*outside, strict=True)))  # type: ignore[arg-type]  # two lists
        for parameter, view in zip(self, self.views, strict=True):
            parameter.grad = view


class BucketedOptimizer:
    """Sends gradients in buckets by Horovod's hooks.

    Horovod's constructor would broadcast the names in its groups, before the rendezvous of an elastic job. A hook on
    each parameter counts down its backward passes, then increments the count of its bucket, and sends the bucket if it
    is complete.
    """

    def __init__(
        self,
        horovod: Any,  # what `hvd.DistributedOptimizer` of Horovod 0.28.1 returns
        names: Mapping[nn.Parameter, str],  # in the order of the model
        compression: Any,  # one of `hvd.Compression`
        start_sum: Callable[[Tensor, str], int],
        share: Callable[[int], Tensor | None],
        squares_at: Callable[[Tensor], float | None],
    ) -> None:
        """`start_sum` begins to sum a tensor in place over all ranks, under a name, and returns Horovod's handle.

        `share` returns zeros in memory, as uint8, in which Horovod sums tensors in place; None without any.
        `squares_at` returns the sum of the squares of a tensor, if Horovod has added them up with the sums.
        """
        self.horovod = horovod
        self.reduces = bool(horovod._requires_update)  # not in a launched world of one
        self._names, self._compression, self._start_sum = names, compression, start_sum
        self._share, self._squares_at = share, squares_at
        self._cast: dict[Bucket, Tensor] = {}  # what was sent of this step, if it is not the bucket itself
        horovod._grouped_allreduce_grad_async = self._send
        self.regroup()

    def regroup(self) -> None:
        """Make buckets of the parameters that require a gradient now. Called between two steps."""
        trained = [parameter for parameter in self._names if parameter.requires_grad]
        self._buckets = in_buckets(trained) if self.reduces else []
        self.horovod._groups = self._buckets
        self.horovod._p_to_group = {parameter: bucket for bucket in self._buckets for parameter in bucket}
        self.horovod._requires_update = set(self.horovod._p_to_group)
        self.is_placed = not self._buckets

    def begin_step(self, passes: int) -> None:
        """Prepare for `passes` backward passes of this rank, the last of which sends the gradients.

        Nothing is left of the step before, even if it was broken.
        """
        self._cast.clear()
        self.horovod._handles.clear()
        self.horovod._group_counts = dict.fromkeys(self._buckets, 0)
        self.horovod.set_backward_passes_per_step(max(1, passes))  # without any, `synchronize` sends all gradients
        if not self.is_placed:
            self._place()
        if passes > 1:  # they add up in the buckets; a single one is moved there, which is faster
            for bucket in self._buckets:
                bucket.flat.zero_()
                for parameter, view in zip(bucket, bucket.views, strict=True):
                    parameter.grad = view

    def synchronize(self) -> Gradients:
        """Send the other gradients, wait until each one is the sum over all ranks, and return them.

        Horovod would send a bucket that lacks a gradient on this rank one parameter at a time, while other ranks send
        it whole. So missing gradients are filled with zeros here.
        """
        handles = self.horovod._handles
        for bucket in self._buckets:
            if bucket not in handles:
                for parameter in bucket:
                    handles.pop(parameter, None)
                handles[bucket] = self._send(bucket)
        self.horovod.synchronize()
        for bucket, sum_of_all in self._cast.items():
            bucket.flat.copy_(sum_of_all)
        squares = [self._squares_at(bucket.flat) for bucket in self._buckets]
        known = [of_bucket for of_bucket in squares if of_bucket is not None]
        return Gradients(
            [bucket.flat for bucket in self._buckets], sum(known) if len(known) == len(self._buckets) else None
        )

    def _send(self, bucket: Bucket) -> tuple[int, Sequence[Any]]:
        bucket.fill()
        sent = self._compression.compress(bucket.flat)[0]
        if sent is not bucket.flat:
            self._cast[bucket] = sent
        return self._start_sum(sent, self._names[bucket[0]]), ()  # there is nothing for Horovod to decompress

    def _place(self) -> None:
        """Give the buckets memory; on CPUs that of which the ranks of a host see each other's, if possible."""
        sizes, first = [bucket.num_bytes for bucket in self._buckets], self._buckets[0][0]
        sums_in_place = first.device.type == "cpu" and self._compression.compress(first)[0] is first
        memory = self._share(sum(sizes)) if sums_in_place else None
        if memory is None:
            memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=first.device)
        for bucket, piece in zip(self._buckets, torch.split(memory, sizes), strict=True):
            bucket.place(piece)
        self.is_placed = True


def in_buckets(parameters: Sequence[nn.Parameter]) -> list[Bucket]:
    """Return buckets of `parameters`, the last first: of 25 MB and at last a small one."""
    sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
    buckets: list[list[nn.Parameter]] = []
    size, left = _BUCKET_BYTES, sum(sizes)
    for parameter, its_size in zip(reversed(parameters), reversed(sizes), strict=True):
        if size >= _BUCKET_BYTES or left <= _LAST_BYTES < left + size or buckets[-1][-1].dtype != parameter.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += its_size
        left -= its_size
    return [Bucket(bucket) for bucket in buckets]


def memory_of_ranks(world: World, num_bytes: int) -> list[Tensor]:
    """Return memory of each rank, [num_bytes] uint8, which begins as zeros; an empty list if a rank cannot see it all.

    It has no name in a file system, and the kernel frees it with the last tensor of all ranks. Waits for all ranks.
    """
    of_ranks = []
    with contextlib.ExitStack() as files:
        number = -1
        with contextlib.suppress(OSError):
            file = os.memfd_create("hvd_train")
            files.callback(os.close, file)
            os.posix_fallocate(file, 0, num_bytes)  # if memory is limited, this fails, and not a later write
            number = file
        for process, its_number in world.gather((os.getpid(), number)):
            with contextlib.suppress(RuntimeError):
                path = f"/proc/{process}/fd/{its_number}"
                of_ranks.append(torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8))
        complete = all(world.gather(len(of_ranks) == world.place.size))
    return of_ranks if complete else []
