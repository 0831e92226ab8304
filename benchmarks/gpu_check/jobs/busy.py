"""A sum behind a kernel that takes so many seconds: each rank answers `right`, or what was wrong."""

from __future__ import annotations

import ctypes
import os
import sys

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from benchmarks.gpu_check.jobs import answer


def occupy(seconds: float) -> None:
    """Keep the current stream busy for about so long, and return at once."""
    stand_in = getattr(ctypes.CDLL(None), "fake_gpu_busy", None)
    if stand_in is not None:
        stand_in(None, int(seconds * 1000))
        return
    cycles = 100_000_000
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)  # clocks rise from rest
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    for _ in range(round(seconds * 1000 / begin.elapsed_time(end))):
        torch.cuda._sleep(cycles)


def main() -> None:
    """Sum once to form communicators, then behind the kernel."""
    hvd.init()
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    seen = "right"
    for number, seconds in enumerate((0.0, float(sys.argv[1]))):
        values = torch.full((100_003,), float(hvd.rank() + number), device="cuda")
        torch.cuda.synchronize()
        occupy(seconds)
        try:
            out = hvd.allreduce(values, name=f"sum {number}", op=hvd.Sum)
        except HorovodInternalError as error:
            seen = f"with {seconds:g} s of work before it: {error}"
            break
        total = hvd.size() * (hvd.size() - 1) / 2 + number * hvd.size()
        if out.unique().tolist() != [total]:
            seen = f"the sum is {out.unique().tolist()[:4]}, not {total:g}"
    answer(seen)
    os._exit(0)  # a broken Horovod may have nobody left to shut down with


if __name__ == "__main__":
    main()
