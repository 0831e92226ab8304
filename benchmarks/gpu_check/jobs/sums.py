"""Groups of sums over the ranks, whose exact results are known: each rank answers with the wrong ones.

The numbers are chosen so that fp16 holds all their sums, in any order of additions, on up to 44 ranks, and bf16 on up
to 15; with more ranks a type is left out. With HOROVOD_BATCH_D2D_MEMCOPIES Horovod's own kernels bring a group into one
buffer and out again, without it copies do; averages go through its kernel for scaling as well. Both are tried in one
job: Horovod reads the variable when it starts.
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from torch import Tensor

from benchmarks.gpu_check.jobs import answer

BATCHED = "HOROVOD_BATCH_D2D_MEMCOPIES"
KINDS = {
    "fp16": (torch.float16,),
    "fp32": (torch.float32,),
    "both": (torch.float16, torch.float32),
    "bf16": (torch.bfloat16,),
}
TENSORS = 5  # of each type in a group


def given(count: int, dtype: torch.dtype, rank: int, number: int) -> Tensor:
    """Return this rank's part of a sum: 0, 1 and 2 times its number from 1, beginning elsewhere in each tensor."""
    return ((torch.arange(count) + number) % 3 * (rank + 1)).to(dtype).cuda()


def expected(count: int, dtype: torch.dtype, size: int, number: int, *, average: bool) -> Tensor:
    """Return the sum, or the average, over `size` ranks."""
    total = size * (size + 1) / 2
    return ((torch.arange(count) + number) % 3 * (total / size if average else total)).to(dtype)


def wrong_sums(sizes: list[int]) -> tuple[int, list[str]]:
    """Return the number of tensors that were summed, and what was wrong with some of them."""
    tried, wrong = 0, list[str]()
    for count, (kind, dtypes), average in itertools.product(sizes, KINDS.items(), (False, True)):
        name = f"{'average' if average else 'sum'} of {count} numbers of {kind}, batched={os.environ[BATCHED]}"
        if any(hvd.size() * (hvd.size() + 1) > 2 / torch.finfo(dtype).eps for dtype in dtypes):
            continue
        parts = [(dtype, number) for dtype in dtypes for number in range(TENSORS)]
        group = [given(count, dtype, hvd.rank(), number) for dtype, number in parts]
        try:
            outs = hvd.grouped_allreduce(group, name=name, op=hvd.Average if average else hvd.Sum)
        except HorovodInternalError as error:
            return tried, [*wrong, f"{name}: {error}"]
        for (dtype, number), out in zip(parts, outs, strict=True):
            tried += 1
            right = expected(count, dtype, hvd.size(), number, average=average)
            if not torch.equal(out.cpu(), right):
                places = int((out.cpu() != right).sum())
                wrong.append(f"{name}, tensor {number}: {places} of {count} are wrong")
    return tried, wrong


def main() -> None:
    """Sum with batched copies and without, and answer."""
    seen: dict[str, Any] = {"tried": 0, "wrong": []}
    for batched in ("1", "0"):
        os.environ[BATCHED] = batched
        hvd.init()
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
        tried, wrong = wrong_sums([int(size) for size in sys.argv[1:]])
        seen["tried"] += tried
        seen["wrong"] += wrong
        if wrong:
            break
        hvd.shutdown()
    answer(seen)
    os._exit(0)  # a broken Horovod may have nobody left to shut down with


if __name__ == "__main__":
    main()
