"""metrics.jsonl read back: line by line, in memory that does not grow with it, and later only what has been added."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvd_train import plain_file
from hvd_train.progress.figures import OF_CLASSES, Shown, by_name, read_all
from hvd_train.run_files.condensed import Condensed

Record = Mapping[str, Any]
"""A line of metrics.jsonl, or the whole of another JSON file."""

_LARGEST = 1e18  # no record of a run has a number as large
_MOST_EVENTS = 500  # of the first ones and of the last ones
_MOST_NOTES = 1000
_LOOKED_BACK_BYTES = 4096
_LONGEST = {"step": 1 << 14, "epoch": 1 << 14}  # bytes of a line; ours have some hundred
_LONGEST_OTHER = 1 << 18  # a change of world names the ranks
_NOTES = ("note", "checkpoint")
_CHANGES = ("start", "world", "end")
_MEANS = ("epoch", "step", "samples", "elapsed", "learning_rate", "images_per_second")


class Interval(NamedTuple):
    """The time from one record of a step to the next one of the same epoch, or several of such times."""

    middle: float
    """In seconds of training; the mean of several."""
    samples: float
    seconds: float


class MetricsFile:
    """What metrics.jsonl has said so far, up to the end of the last look.

    Each record has a field `elapsed` besides: the seconds that the run had trained until then, without the time between
    its end and the moment it was resumed. Where there are thousands of steps or epochs, a record stands for some
    neighbours; the last ten are always as they came.
    """

    def __init__(self, path: Path) -> None:
        """Prepare to read `path`, which may be missing or damaged: `gaps` says so."""
        self._path = path
        self._begin()

    def _begin(self) -> None:
        self.figures: tuple[Shown, ...] = OF_CLASSES
        """What the run measures."""
        self.best = by_name(OF_CLASSES, None)
        """The figure that says which epoch is the best one."""
        self.steps: Condensed[Record] = Condensed(lambda one, other: mean_of_steps(one, other, self.figures))
        self.epochs: Condensed[Record] = Condensed(lambda one, other: better_epoch(one, other, self.best))
        self.intervals: Condensed[Interval] = Condensed(_sum_of_intervals)
        self.num_events = 0
        self.last_write: float | None = None
        """The time of the last record, in seconds since 1970; None where there is no record."""
        self.error: str | None = None
        """Why nothing can be read."""
        self._first_events: list[Record] = []
        self._last_events: deque[Record] = deque()
        self._changes: dict[str, Record] = {}  # the last one of each kind between the first and the last events
        self._inode = self._offset = 0
        self._before_offset = b""
        self._num_lines = self._num_bad = self._first_bad = self._num_records = 0
        self._torn = False
        self._seconds = 0.0
        self._time: float | None = None
        self._notes: list[dict[str, Any]] = []  # those right before this place
        self._before_notes = 0.0
        self._last_step: Record | None = None

    def look(self) -> None:
        """Read what has been added since the last look; all, where the file is another one or has been cut."""
        try:
            with plain_file.opened(self._path) as file:
                status = os.fstat(file.fileno())
                file.seek(self._offset - len(self._before_offset))
                if status.st_ino != self._inode or file.read(len(self._before_offset)) != self._before_offset:
                    self._begin()
                    self._inode = status.st_ino
                    file.seek(0)
                self._torn = False
                for line in plain_file.lines(file):
                    self._torn = not line.endswith(b"\n")
                    if not self._torn:
                        self._offset += len(line)
                        self._before_offset = line[-_LOOKED_BACK_BYTES:]
                        self._take(line)
                self.error = None
        except OSError as error:
            self._begin()
            self.error = error.strerror or "it is damaged"

    def events(self) -> tuple[Record, ...]:
        """Return the events: where there are thousands the first and the last ones, and the last changes of between."""
        between = sorted(self._changes.values(), key=lambda event: event["elapsed"])
        return (*self._first_events, *between, *self._last_events)

    def gaps(self) -> list[str]:
        """Return a line for each thing that is missing or cannot be read, with the reason."""
        name, num_bad = self._path.name, self._num_bad + self._torn
        if self.error is not None:
            return [f"no metrics: {name} cannot be read ({self.error})"]
        found = []
        if num_bad == 1 and (self._torn or self._first_bad == self._num_lines):
            found.append(f"the last line of {name} is torn: the process was ended while it wrote, or is about to go on")
        elif num_bad:
            first = self._first_bad or self._num_lines + 1
            found.append(f"{num_bad} lines of {name} cannot be read, the first of them line {first}")
        if not self._num_records:
            found.append(f"no metrics: {name} is empty")
        return found

    def _take(self, line: bytes) -> None:
        self._num_lines += 1
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if (
            not isinstance(record, dict)
            or number(record, "time") is None
            or len(line) > _LONGEST.get(str(record.get("kind")), _LONGEST_OTHER)
        ):
            self._num_bad += 1
            self._first_bad = self._first_bad or self._num_lines
            return
        self._num_records += 1
        self._count_seconds(record)
        self.last_write = max(record["time"], self.last_write or record["time"])
        kind = record.get("kind")
        if kind == "step":
            self._take_step(record)
        elif kind == "epoch":
            self.epochs.append(record)
        elif kind == "event":
            self._take_event(record)

    def _count_seconds(self, record: dict[str, Any]) -> None:
        """Give a record its `elapsed`.

        A run that is resumed writes its notes before the event "start": the pause ends with the first of them.
        """
        passed = 0.0 if self._time is None else max(0.0, record["time"] - self._time)
        self._time = record["time"]
        if record.get("kind") == "event" and record.get("name") == "start":
            if self._notes:
                self._seconds, before = self._before_notes, self._notes[0]["time"]
                for note in self._notes:
                    self._seconds += max(0.0, note["time"] - before)
                    note["elapsed"], before = self._seconds, note["time"]
                self._seconds += passed
            self._notes = []
        elif record.get("name") in _NOTES and len(self._notes) < _MOST_NOTES:
            self._before_notes = self._before_notes if self._notes else self._seconds
            self._notes.append(record)
            self._seconds += passed
        else:
            self._notes = []
            self._seconds += passed
        record["elapsed"] = self._seconds

    def _take_step(self, record: Record) -> None:
        """Take the record of a step: evaluations lie between epochs, so that only within one there is a speed."""
        before, self._last_step = self._last_step, record
        self.steps.append(record)
        if before is not None and before.get("epoch") == record.get("epoch"):
            samples = (number(record, "samples") or 0.0) - (number(before, "samples") or 0.0)
            seconds = record["elapsed"] - before["elapsed"]
            if samples > 0 and seconds > 0:
                self.intervals.append(Interval(before["elapsed"] + seconds / 2, samples, seconds))

    def _take_event(self, record: Record) -> None:
        self.num_events += 1
        if record.get("name") == "start":
            self.figures = read_all(record.get("figures"))
            self.best = by_name(self.figures, record.get("best_by"))
        if len(self._first_events) < _MOST_EVENTS:
            self._first_events.append(record)
            return
        self._last_events.append(record)
        if len(self._last_events) > _MOST_EVENTS:
            gone = self._last_events.popleft()
            if gone.get("name") in _CHANGES:
                self._changes[gone["name"]] = gone


def number(record: Record, name: str) -> float | None:
    """Return a field of a record where it is a finite number, else None."""
    value = record.get(name)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGEST:
        return float(value)
    return None


def mean_of_steps(one: Record, other: Record, figures: Sequence[Shown] = OF_CLASSES) -> Record:
    """Return the record that stands for two neighbours: the means of their numbers, the rest as in the second one."""
    joined = {**other, **_means(one, other, (*_MEANS, *(figure.name for figure in figures)))}
    split, before = other.get("split"), one.get("split")
    if isinstance(split, dict) and isinstance(before, dict):
        joined["split"] = _means(before, split, (*split,))
    elif isinstance(before, dict):
        joined["split"] = before
    return joined


def _means(one: Record, other: Record, names: tuple[str, ...]) -> dict[str, float]:
    means = {}
    for name in names:
        a, b = number(one, name), number(other, name)
        if a is not None or b is not None:
            means[name] = ((b if a is None else a) + (a if b is None else b)) / 2  # type: ignore[operator]
    return means


def better_epoch(one: Record, other: Record, figure: Shown) -> Record:
    """Return the record that stands for two neighbours: that of the better figure on the validation set."""
    first, second = (number(epoch, f"val_{figure.name}") for epoch in (one, other))
    if second is None:
        return one if first is not None else other
    return other if first is None or figure.is_better(second, first) else one


def _sum_of_intervals(one: Interval, other: Interval) -> Interval:
    return Interval((one.middle + other.middle) / 2, one.samples + other.samples, one.seconds + other.seconds)
