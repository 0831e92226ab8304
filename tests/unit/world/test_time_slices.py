"""Threads with short time slices, as the kernel itself tells them."""

from __future__ import annotations

import os
import re
import struct
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the kernel is asked for, on a Linux with another processor than this one perhaps."""
    calls: list[tuple[Any, ...]] = []
    library = SimpleNamespace(syscall=lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(time_slices.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(time_slices.platform, "machine", lambda: "aarch64")
    return calls


def test_the_kernel_is_asked_for_nothing_but_another_slice(asked: list[tuple[Any, ...]]) -> None:
    """By sched_setattr(2), for this thread, with 48 bytes as the manual page lays them out; then for its default."""
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    with time_slices.short():
        pass
    assert [(number, thread, flags) for number, thread, _, flags in asked] == [(274, 0, 0)] * 2
    laid_out = [struct.unpack("=IIQiIQQQ", attributes) for _, _, attributes, _ in asked]
    assert laid_out == [(48, os.SCHED_OTHER, 0, nice, 0, slice_ns, 0, 0) for slice_ns in (100_000, 0)]


def test_a_thread_that_is_more_important_than_others_stays_so(
    asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may give a training a niceness below zero means it."""
    monkeypatch.setattr(os, "getpriority", lambda which, thread: -5)
    with time_slices.short():
        pass
    assert [struct.unpack("=IIQiIQQQ", attributes)[3] for _, _, attributes, _ in asked] == [-5, -5]


@pytest.mark.parametrize(("machine", "system"), [("riscv64", "Linux"), ("aarch64", "Darwin")])
def test_no_other_kernel_is_asked_by_that_number(
    asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, machine: str, system: str
) -> None:
    """It may mean another system call there."""
    monkeypatch.setattr(time_slices.platform, "machine", lambda: machine)
    monkeypatch.setattr(time_slices.platform, "system", lambda: system)
    with time_slices.short():
        pass
    assert asked == []


def test_a_thread_of_another_policy_keeps_it(asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who starts a training in batch or real time wants that more than short slices."""
    monkeypatch.setattr(os, "sched_getscheduler", lambda thread: os.SCHED_BATCH)
    with time_slices.short():
        pass
    assert asked == []
