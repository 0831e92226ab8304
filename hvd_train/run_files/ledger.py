"""Which samples each finished step took, for anyone to audit: ledger.jsonl in the run folder."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from hvd_train.errors import UsageError
from hvd_train.run_files import durable

LEDGER = "ledger.jsonl"


@dataclass(frozen=True)
class Entry:
    """A finished step: `epoch` counts from 0, `step` from 1 over the whole run; samples are those of all ranks."""

    epoch: int
    step: int
    world_size: int
    samples: tuple[int, ...]

    def line(self) -> str:
        """As it stands in the file."""
        values = {"epoch": self.epoch, "step": self.step, "world_size": self.world_size, "samples": [*self.samples]}
        return json.dumps(values) + "\n"


class LedgerFile:
    """ledger.jsonl of a run that goes on at some step: what is in it beyond that did not happen."""

    def __init__(self, folder: Path, step: int) -> None:
        path = folder / LEDGER
        entries = [entry for entry in read(path) if entry.step <= step] if path.exists() else []
        durable.write_text(path, "".join(entry.line() for entry in entries))
        self._file: TextIO = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  # until close
        self._last = entries[-1].step if entries else 0

    def write(self, entry: Entry) -> None:
        """Add a step, unless it is there. Raises OSError."""
        if entry.step > self._last:
            self._file.write(entry.line())
            self._last = entry.step

    def keep(self) -> None:
        """What is written outlives the machine. Raises OSError."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Nothing more will come."""
        self._file.close()


@dataclass(frozen=True)
class Audit:
    """What a ledger proves. `epochs` are the finished ones; `faults` are lines, none where all is well."""

    epochs: int
    steps: int
    num_samples: int
    world_sizes: tuple[int, ...]
    faults: tuple[str, ...]
    times: int = 1
    """So many epochs count as one, in which each sample comes so many times (repeated augmentation)."""

    def __str__(self) -> str:
        if self.faults:
            return "NOT exact: " + "; ".join(self.faults[:3])
        sizes = ", ".join(str(size) for size in self.world_sizes)
        turns = "once in each" if self.times == 1 else f"{self.times} times in {self.times} epochs,"
        return (
            f"exact: every one of {self.num_samples:,} samples counted {turns} of {self.epochs} finished epochs "
            f"({self.steps:,} steps, world sizes {sizes})"
        )


def audit(folder: Path) -> Audit:
    """Check the ledger of a run folder. Raises UsageError where there is none."""
    path = folder / LEDGER
    if not path.exists():
        raise UsageError(f"{folder} has no {LEDGER}: train with --ledger to have one")
    entries = list(read(path))
    start = _start(folder)
    return audit_entries(entries, int(start["num_samples"]), int(start.get("repeated_augmentation", 1)))


def audit_entries(entries: Sequence[Entry], num_samples: int, times: int = 1) -> Audit:
    """Each step once and in order; in each epoch each sample at most once, in each but the last exactly once.

    With repeated augmentation `times` epochs count as one, in which each sample comes `times` times.
    """
    faults = []
    steps = [entry.step for entry in entries]
    if steps != list(range(1, len(steps) + 1)):
        wrong = next(number for number, step in enumerate(steps, 1) if number != step)
        faults.append(f"line {wrong} is of step {steps[wrong - 1]}")
    finished = 0
    last = max((entry.epoch for entry in entries), default=-1) // times
    for turn in range(last + 1):
        counts = Counter(sample for entry in entries if entry.epoch // times == turn for sample in entry.samples)
        name = f"epoch {turn}" if times == 1 else f"epochs {turn * times} to {turn * times + times - 1}"
        often, strange = sum(count > times for count in counts.values()), sum(s >= num_samples for s in counts)
        rare = sum(counts[sample] < times for sample in range(num_samples))
        if often or strange:
            faults.append(f"{name}: {often} samples more than {_times(times)}, {strange} that do not exist")
        if rare and turn < last:
            faults.append(f"{name}: {rare} samples {'never' if times == 1 else f'less than {_times(times)}'}")
        finished += times if not rare else counts.total() // num_samples if turn == last and times > 1 else 0
    sizes = tuple(sorted({entry.world_size for entry in entries}))
    return Audit(finished, len(entries), num_samples, sizes, tuple(faults), times)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def read(path: Path) -> Iterable[Entry]:
    """The entries of a ledger; a torn last line, of a process that was killed, is left out.

    Raises UsageError for a line that is not an entry.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            values: dict[str, Any] = json.loads(line)
            entry = Entry(values["epoch"], values["step"], values["world_size"], tuple(values["samples"]))
        except (ValueError, KeyError, TypeError):
            if number == len(lines) and not line.endswith("\n"):
                return
            raise UsageError(f"{path}: line {number} is not a step of a ledger") from None
        yield entry


def _start(folder: Path) -> dict[str, Any]:
    """What the run has written down at its start: num_samples, of the training set, among others."""
    path = folder / "metrics.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and record.get("name") == "start" and "num_samples" in record:
            return record
    raise UsageError(f"{path} does not say how many samples the training set has: the ledger cannot be judged")
