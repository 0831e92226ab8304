"""The ledger: which samples each finished step took, in ledger.jsonl of the run folder, for anyone to audit."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from hvd_train.errors import UsageError
from hvd_train.run_files import durable
from hvd_train.run_files.run_folder import METRICS

LEDGER = "ledger.jsonl"


@dataclass(frozen=True)
class Entry:
    """The samples of a finished step.

    `epoch` counts from 0, `step` from 1 over the whole run; `samples` are indices into the training set, of all ranks
    together.
    """

    epoch: int
    step: int
    world_size: int
    samples: tuple[int, ...]

    def line(self) -> str:
        """Return the entry as a line of ledger.jsonl, with its line end."""
        values = {"epoch": self.epoch, "step": self.step, "world_size": self.world_size, "samples": [*self.samples]}
        return json.dumps(values) + "\n"


class LedgerFile:
    """The ledger.jsonl of a run that trains, open for writing."""

    def __init__(self, folder: Path, step: int) -> None:
        """Open the ledger in `folder` and remove entries after `step`: the run goes on there, so they did not happen.

        Raises OSError where the file cannot be written, and UsageError where it holds something else than entries.
        """
        path = folder / LEDGER
        entries = [entry for entry in read(path) if entry.step <= step] if path.exists() else []
        durable.write_text(path, "".join(entry.line() for entry in entries))
        self._file: TextIO = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  # until close
        self._last_step = entries[-1].step if entries else 0

    def write(self, entry: Entry) -> None:
        """Append the entry of a step, unless the ledger has it already. Raises OSError."""
        if entry.step > self._last_step:
            self._file.write(entry.line())
            self._last_step = entry.step

    def sync(self) -> None:
        """Force the entries to disk, where they outlive a power failure. Raises OSError."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. Raises OSError."""
        self._file.close()


@dataclass(frozen=True)
class Audit:
    """What a ledger proves: `faults` has a line for each deviation and is empty where the training was exact."""

    epochs: int
    """Finished epochs."""
    steps: int
    num_samples: int
    """Size of the training set."""
    world_sizes: tuple[int, ...]
    """All world sizes that took part, in rising order."""
    faults: tuple[str, ...]
    repetitions: int = 1
    """With repeated augmentation each sample comes this often in this many epochs, which are judged as one."""

    def __str__(self) -> str:
        if self.faults:
            return "NOT exact: " + "; ".join(self.faults[:3])
        sizes = ", ".join(str(size) for size in self.world_sizes)
        times = self.repetitions
        counted = "once in each" if times == 1 else f"{times} times in {times} epochs,"
        return (
            f"exact: every one of {self.num_samples:,} samples counted {counted} of {self.epochs} finished epochs "
            f"({self.steps:,} steps, world sizes {sizes})"
        )


def audit(folder: Path) -> Audit:
    """Check the ledger of a run folder.

    Raises UsageError where there is no ledger, where a line of it is not an entry, or where metrics.jsonl does not say
    how many samples the training set has.
    """
    path = folder / LEDGER
    if not path.exists():
        raise UsageError(f"{folder} has no {LEDGER}: train with --ledger to have one")
    entries = list(read(path))
    start = _start_event(folder)
    return audit_entries(entries, int(start["num_samples"]), int(start.get("repeated_augmentation", 1)))


def audit_entries(entries: Sequence[Entry], num_samples: int, repetitions: int = 1) -> Audit:
    """Check entries: each step comes once and in order, and in each finished epoch each sample comes exactly once.

    In the last epoch, which may be unfinished, a sample may be missing, but must not come twice. With repeated
    augmentation `repetitions` epochs are judged as one round, in which each sample comes `repetitions` times.
    """
    faults = []
    steps = [entry.step for entry in entries]
    if steps != list(range(1, len(steps) + 1)):
        wrong = next(number for number, step in enumerate(steps, 1) if number != step)
        faults.append(f"line {wrong} is of step {steps[wrong - 1]}")
    finished = 0
    last_round = max((entry.epoch for entry in entries), default=-1) // repetitions
    for number in range(last_round + 1):
        counts = Counter(
            sample for entry in entries if entry.epoch // repetitions == number for sample in entry.samples
        )
        first = number * repetitions
        name = f"epoch {number}" if repetitions == 1 else f"epochs {first} to {first + repetitions - 1}"
        too_often = sum(count > repetitions for count in counts.values())
        unknown = sum(sample >= num_samples for sample in counts)
        too_rare = sum(counts[sample] < repetitions for sample in range(num_samples))
        if too_often or unknown:
            faults.append(f"{name}: {too_often} samples more than {_times(repetitions)}, {unknown} that do not exist")
        if too_rare and number < last_round:
            faults.append(
                f"{name}: {too_rare} samples {'never' if repetitions == 1 else f'less than {_times(repetitions)}'}"
            )
        if not too_rare:
            finished += repetitions
        elif number == last_round and repetitions > 1:
            finished += counts.total() // num_samples
    sizes = tuple(sorted({entry.world_size for entry in entries}))
    return Audit(finished, len(entries), num_samples, sizes, tuple(faults), repetitions)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def read(path: Path) -> Iterator[Entry]:
    """Yield the entries of a ledger, without a torn last line: a killed process leaves one.

    Raises UsageError where another line is not an entry, and OSError where the file cannot be read.
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


def _start_event(folder: Path) -> dict[str, Any]:
    """Return the first "start" event of metrics.jsonl that has num_samples. Raises UsageError where there is none."""
    path = folder / METRICS
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and record.get("name") == "start" and "num_samples" in record:
            return record
    raise UsageError(f"{path} does not say how many samples the training set has: the ledger cannot be judged")
