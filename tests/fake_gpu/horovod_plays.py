"""What tests play with Horovod's sums on the stand-in: horovodrun ... python -m tests.fake_gpu.horovod_plays NAME.

Each rank prints what it has seen as one line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError


def begun() -> ctypes.CDLL:
    """Let this rank meet the others, with a GPU of its own, and return the stand-in."""
    hvd.init()
    torch.cuda.set_device(hvd.local_rank())
    return ctypes.CDLL(None)


def sums(*milliseconds: str) -> Any:
    """A group of sums as the trainer has them, with the GPU busy before each for so many milliseconds."""
    stand_in = begun()
    seen = []
    for number, busy in enumerate(milliseconds):
        mean = number + (hvd.size() - 1) / 2  # another one in each sum, of other numbers on each rank
        group = [torch.full((count,), float(number + hvd.rank()), device="cuda") for count in (5, 3)]
        torch.cuda.synchronize()
        stand_in.fake_gpu_busy(None, int(busy))
        try:
            outs = hvd.synchronize(hvd.grouped_allreduce_async_(group, name=f"sum {number}", op=hvd.Average))
            seen.append([out.tolist() for out in outs] == [[mean] * 5, [mean] * 3])
        except HorovodInternalError as error:
            seen.append(str(error))
    return seen


def processor_time(milliseconds: str) -> Any:
    """The share of a core that a rank takes while a sum waits for a GPU that is busy for so many milliseconds."""
    stand_in = begun()
    numbers = torch.ones(5, device="cuda")
    hvd.allreduce(numbers, name="sets up")
    torch.cuda.synchronize()
    stand_in.fake_gpu_busy(None, int(milliseconds))
    taken, began = time.process_time(), time.monotonic()
    hvd.allreduce(numbers, name="waits")
    return (time.process_time() - taken) / (time.monotonic() - began)


def sums_for_stream(milliseconds: str) -> Any:
    """Two sums that the GPU's stream waits for, of which the second has the first in it, and a sum for the host.

    The GPU is busy before them for so many milliseconds. Told are whether the host was back before it was idle, and
    what came out.
    """
    stand_in = begun()
    numbers = torch.arange(5.0, device="cuda")
    hvd.allreduce(numbers, name="sets up")
    torch.cuda.synchronize()
    stand_in.fake_gpu_busy(None, int(milliseconds))
    try:
        first = hvd.sum_for_stream_(numbers, "first")
        host_is_ahead = not torch.cuda.current_stream().query()
        second = hvd.sum_for_stream_(first + 1, "second")
        return [host_is_ahead, second.tolist(), hvd.allreduce(second, name="third", op=hvd.Sum).tolist()]
    except HorovodInternalError as error:
        return [str(error)]


def bfloats() -> Any:
    """Whether sums, averages and scaled sums of bfloat16, alone and in groups, are those of CPUs."""
    begun()
    seen = []
    for count in (1, 7, 40_001):
        group = [torch.linspace(-3, 5 + hvd.rank() + n, count).bfloat16() for n in range(3)]
        scaled = {"prescale_factor": 0.3, "postscale_factor": 7}
        for op, factors in ((hvd.Sum, {}), (hvd.Average, {}), (hvd.Sum, scaled)):
            name = f"{count} {op} {factors}"
            here = hvd.grouped_allreduce(group, op=op, name=f"cpu {name}", **factors)
            there = hvd.grouped_allreduce([one.cuda() for one in group], op=op, name=f"gpu {name}", **factors)
            alone = [hvd.allreduce(one.cuda(), op=op, name=f"{n} {name}", **factors) for n, one in enumerate(group)]
            pairs = zip([*there, *alone], [*here, *here], strict=True)
            seen.append(all(torch.equal(one.cpu(), right) for one, right in pairs))
    return seen


PLAYS = {"bfloats": bfloats, "sums": sums, "processor_time": processor_time, "sums_for_stream": sums_for_stream}

if __name__ == "__main__":
    print(json.dumps(PLAYS[sys.argv[1]](*sys.argv[2:])), flush=True)
    sys.stdout.flush()
    os._exit(0)  # a broken Horovod may have nobody left to shut down with
