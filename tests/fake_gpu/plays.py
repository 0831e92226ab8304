"""Sums on the stand-in: horovodrun ... python -m tests.fake_gpu.plays MILLISECONDS;
each rank prints a JSON line.
"""

import ctypes
import json
import os
import sys
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError


def sums(*milliseconds: str) -> Any:
    """A group of sums as the trainer has them, with the GPU busy before each
    for so many milliseconds.
    """
    stand_in = ctypes.CDLL(None)
    hvd.init()
    torch.cuda.set_device(hvd.local_rank())
    seen = []
    for number, busy in enumerate(milliseconds):
        # another one in each sum, of other numbers on each rank
        mean = number + (hvd.size() - 1) / 2
        group = [
            torch.full((count,), float(number + hvd.rank()), device="cuda") for count in (5, 3)
        ]
        torch.cuda.synchronize()
        stand_in.fake_gpu_busy(None, int(busy))
        try:
            outs = hvd.synchronize(
                hvd.grouped_allreduce_async_(group, name=f"sum {number}", op=hvd.Average)
            )
            seen.append([out.tolist() for out in outs] == [[mean] * 5, [mean] * 3])
        except HorovodInternalError as error:
            seen.append(str(error))
    return seen


if __name__ == "__main__":
    print(json.dumps(sums(*sys.argv[1:])), flush=True)
    os._exit(0)  # a broken Horovod may have nobody left to shut down with
