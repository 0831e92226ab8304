"""The record of where a process is: what others read in it, and that it costs next to nothing."""

from __future__ import annotations

import mmap
import os
import time

import pytest

from hvd_train.progress import whereabouts
from hvd_train.progress.clock import PHASES, Split
from hvd_train.progress.whereabouts import Record, read


def test_what_is_noted_is_read() -> None:
    """Place, step, phase and what is waited for are there, each since when."""
    record, before = Record(), time.monotonic_ns()
    record.place(3, 8)
    record.step(812)
    record.at("data")
    with record.waiting("the sum of gradients"):
        inside = record.read()
    after = record.read()
    assert (inside.rank, inside.size, inside.step, inside.phase) == (3, 8, 812, "data")
    assert before <= inside.phase_since <= inside.waits_since <= time.monotonic_ns()
    assert (inside.waits_for, after.waits_for, after.waits_since) == ("the sum of gradients", "", 0)


def test_a_wait_inside_another_one() -> None:
    """When the inner one is over, the outer one stands there as before."""
    record = Record()
    with record.waiting("gather"):
        outer = record.read()
        with record.waiting("a name that is longer than forty-eight letters, of which the first ones are kept"):
            assert record.read().waits_for == "a name that is longer than forty-eight letters, "
        assert record.read() == outer


def test_it_goes_on_in_memory_that_others_read() -> None:
    """What was noted before comes along, and each further note is there at once, by another way into that memory."""
    record, file = Record(), os.memfd_create("record")
    try:
        os.ftruncate(file, whereabouts.SIZE)
        record.place(1, 2)
        record.move_to(mmap.mmap(file, whereabouts.SIZE))
        record.step(5)
        record.at("backward")
        found = read(os.pread(file, whereabouts.SIZE, 0))
    finally:
        os.close(file)
    assert (found.rank, found.size, found.step, found.phase) == (1, 2, 5, "backward")


def test_the_clock_tells_the_phases() -> None:
    """A mark of any phase of a step is taken, and what surely follows it is noted."""
    split = Split(lambda: 0.0)
    for phase in PHASES:
        split.mark(phase)
    split.mark("data")
    assert whereabouts.here.read().phase == "forward"
    split.mark("forward")
    assert whereabouts.here.read().phase == "backward"


@pytest.mark.parametrize("content", [b"", bytes(whereabouts.SIZE), b"hvd-why1" + b"\xff" * (whereabouts.SIZE - 8)])
def test_bytes_that_are_no_record(content: bytes) -> None:
    """Whatever another process has in its memory is refused."""
    with pytest.raises(ValueError, match=r"record|phase"):
        read(content)
