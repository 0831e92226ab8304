"""Short time slices for threads that wake, do little and sleep again, beside others that compute."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterator
from contextlib import contextmanager

_SHORTEST_NS = 100_000  # the kernel takes no less
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # the number of the call


@contextmanager
def short() -> Iterator[None]:
    """Threads that are started by this one meanwhile have short slices for all their life.

    Since Linux 6.6 a thread that wakes does not take its core from one that computes before that one's slice is over,
    and this is looked at once a tick, every 4 ms as kernels are usually built: for a reduction by Gloo, whose threads
    wake at every message, longer than all its work. From 6.12 on a thread of a shorter slice goes first
    (Documentation/scheduler/sched-eevdf.rst; sched_setattr(2), for which nobody needs a privilege). Elsewhere nothing
    changes.
    """
    _set_slice(_SHORTEST_NS)
    try:
        yield
    finally:
        _set_slice(0)  # the usual one


def _set_slice(nanoseconds: int) -> None:
    """Of this thread, which keeps its niceness. Nothing depends on whether the kernel does it."""
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or platform.system() != "Linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)  # of the thread, on Linux
    # struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period
    attributes = struct.pack("=IIQiIQQQ", 48, os.SCHED_OTHER, 0, nice, 0, nanoseconds, 0, 0)
    ctypes.CDLL(None).syscall(number, 0, attributes, 0)
