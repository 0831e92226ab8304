"""Where this process is in its training: a small record in memory, which other processes of its user can read.

It is written at each phase of a step and around each wait for other ranks, so it must cost next to nothing; and it is
read while nothing moves any more (`hvd-train why`), so it must need no help of the process that it is about. No torch.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from mmap import mmap

_AFTER = {"data": "forward", "forward": "backward", "reduction": "optimizer"}
"""What begins when a phase of `clock.PHASES` ends, as far as that is certain: the clock tells the end of each."""
PHASES = (
    *("start", "meeting", "data", "forward", "backward", "reduction", "optimizer", "commit", "other"),
    *("evaluation", "end"),
)
_NUMBERS = {name: number for number, name in enumerate(PHASES)}
_NEXT = {phase: _NUMBERS[_AFTER.get(phase, "other")] for phase in PHASES}

_MAGIC = b"hvd-why1"
_HEAD = struct.Struct("=8siiq")  # magic, rank, size, step
_PHASE = struct.Struct("=qq")  # since when, which
_WAIT = struct.Struct("=q48s")  # since when (0: there is no wait), for what
_PHASE_AT = _HEAD.size
_WAIT_AT = _PHASE_AT + _PHASE.size
SIZE = _WAIT_AT + _WAIT.size
_STEP, _STEP_AT = struct.Struct("=q"), _HEAD.size - 8


Memory = bytearray | mmap
"""What a record can be kept in."""


@dataclass(frozen=True)
class Whereabouts:
    """Where a process is; times are its host's time.monotonic_ns()."""

    rank: int
    size: int
    step: int
    """The step that is under way, counted from 1; 0 before the first."""
    phase: str
    """One of PHASES."""
    phase_since: int
    waits_for: str
    """What it waits for other ranks in; empty where it does not wait for them."""
    waits_since: int


class Record:
    """The record of this process, at first in memory that nobody else sees."""

    def __init__(self) -> None:
        self._memory: Memory = bytearray(SIZE)
        self._wait = _WAIT.pack(0, b"")
        self._now = time.monotonic_ns
        self.place(0, 1)
        self.at("start")

    def move_to(self, memory: Memory) -> None:
        """Keep the record in other memory from here on."""
        memory[:SIZE] = bytes(self._memory[:SIZE])
        self._memory = memory

    def place(self, rank: int, size: int) -> None:
        """Note which rank of how many this process is."""
        step = bytes(self._memory[_STEP_AT : _HEAD.size])
        self._memory[: _HEAD.size] = _HEAD.pack(_MAGIC, rank, size, *_STEP.unpack(step))

    def step(self, number: int) -> None:
        """Note that this step begins."""
        _STEP.pack_into(self._memory, _STEP_AT, number)

    def at(self, phase: str) -> None:
        """Note that one of PHASES begins."""
        _PHASE.pack_into(self._memory, _PHASE_AT, self._now(), _NUMBERS[phase])

    def after(self, phase: str) -> None:
        """Note that a phase of a step ends, and with it the next one begins."""
        _PHASE.pack_into(self._memory, _PHASE_AT, self._now(), _NEXT[phase])

    def waiting(self, what: str) -> Waiting:
        """Return a context manager for a wait for other ranks; one inside another counts as the outer one again."""
        return Waiting(self, what)

    def begin_wait(self, what: bytes) -> bytes:
        """Note that a wait begins, and return what stood there before."""
        before = self._wait
        self._wait = self._memory[_WAIT_AT:SIZE] = _WAIT.pack(self._now(), what)
        return before

    def end_wait(self, before: bytes) -> None:
        """Note that it is over; `before` is what its begin has returned."""
        self._wait = self._memory[_WAIT_AT:SIZE] = before

    def read(self) -> Whereabouts:
        """Return what the record says."""
        return read(bytes(self._memory[:SIZE]))


class Waiting:
    """The block in which a process waits for other ranks."""

    __slots__ = ("_before", "_record", "_what")

    def __init__(self, record: Record, what: str) -> None:
        self._record, self._what = record, what.encode(errors="replace")[:48]

    def __enter__(self) -> None:
        self._before = self._record.begin_wait(self._what)

    def __exit__(self, *_: object) -> None:
        self._record.end_wait(self._before)


def read(content: bytes) -> Whereabouts:
    """Return what the bytes of a record say. Raises ValueError where they are none."""
    if len(content) != SIZE or not content.startswith(_MAGIC):
        raise ValueError("these bytes are no record of where a process is")
    _, rank, size, step = _HEAD.unpack_from(content)
    since, number = _PHASE.unpack_from(content, _PHASE_AT)
    if not 0 <= number < len(PHASES):
        raise ValueError(f"there is no phase {number}")
    waits_since, what = _WAIT.unpack_from(content, _WAIT_AT)
    name = what.rstrip(b"\0").decode(errors="replace") if waits_since else ""
    return Whereabouts(rank, size, step, PHASES[number], since, name, waits_since)


here = Record()
"""The record of this process."""
