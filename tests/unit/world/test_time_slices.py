"""Threads with short time slices, as the kernel itself tells them."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest

from hvd_train.world import time_slices

TASKS = Path("/proc/self/task")


def slice_ns() -> int | None:
    """Return this thread's time slice, or None where the kernel does not tell it (Linux 6.12, CONFIG_SCHED_DEBUG)."""
    path = TASKS / str(threading.get_native_id()) / "sched"
    found = re.search(r"^se\.slice\s*:\s*(\d+)", path.read_text() if path.exists() else "", re.MULTILINE)
    return int(found[1]) if found else None


def slice_of_new_thread() -> int | None:
    """Return the time slice of a new thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(slice_ns()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.skipif(slice_ns() is None, reason="this kernel does not tell the time slices of threads")
def test_threads_started_meanwhile_keep_short_slices() -> None:
    """They go before a thread that computes; whoever starts them is as before, and so is what it starts later."""
    before = slice_ns()
    with time_slices.short():
        assert slice_of_new_thread() == 100_000
    assert slice_ns() == before
    assert slice_of_new_thread() == before


def test_niceness_stays() -> None:
    """A training that was started as nice as can be stays so."""
    found = []

    def nice_one() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 7)
        with time_slices.short():
            found.append(os.getpriority(os.PRIO_PROCESS, 0))
        found.append(os.getpriority(os.PRIO_PROCESS, 0))

    thread = threading.Thread(target=nice_one)
    thread.start()
    thread.join()
    assert found == [7, 7]
