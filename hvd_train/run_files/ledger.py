"""The ledger: which samples finished steps took, in ledger.jsonl of the run folder, and its audit.

A line has one or more steps in a row: the positions of the epoch's order that they took, and a fingerprint of the
samples that the loaders of all ranks delivered. The fingerprints of an epoch add up to the fingerprint of all samples
only if each sample came once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from hvd_train import plain_file
from hvd_train.errors import UsageError
from hvd_train.progress.fingerprint import added, fingerprint, of_all
from hvd_train.progress.order import order_of
from hvd_train.run_files.run_folder import FROM_FILE, METRICS

LEDGER = "ledger.jsonl"
_LINES_PER_EPOCH = 100  # if the world stays as it is
_AT_ONCE = 1 << 20  # samples that an audit looks up at once
_MOST_SAMPLES = 10**10  # of a round: an audit takes minutes for as many, and a file can claim any number
_MOST_FAULTS = 100
_of_all = lru_cache(of_all)


@dataclass(frozen=True)
class Entry:
    """Finished steps in a row, of one epoch and in worlds of one size."""

    epoch: int
    """Counted from 0."""
    steps: tuple[int, int]
    """The first and the last of them, counted from 1 over the whole run."""
    world_size: int
    positions: tuple[int, int]
    """The positions of the epoch's order that they took: the first one, and the one after the last."""
    fingerprint: int
    """The fingerprint (`progress.fingerprint`) of the samples that all ranks took."""
    data_changed: tuple[int, int] | None = None
    """Numbers of samples: the training set was changed after all earlier steps, from this to that; `steps` is empty."""

    def line(self) -> str:
        """Return the entry as a line of ledger.jsonl, with its line end."""
        values = {name: value for name, value in vars(self).items() if value is not None}
        return json.dumps({**values, "fingerprint": f"{self.fingerprint:016x}"}) + "\n"


def extended(entries: Sequence[Entry], step: Entry, num_samples: int) -> list[Entry]:
    """Return the entries of an epoch of `num_samples` positions with one more step; a new epoch begins with it alone.

    Steps are joined while the world size is the same and they begin in the same hundredth of the epoch, so every rank
    makes the same entries.
    """
    if not entries or entries[-1].epoch != step.epoch:
        return [step]
    *others, last = entries
    end = last.world_size, last.steps[1] + 1, last.positions[1]
    continues = end == (step.world_size, step.steps[0], step.positions[0])
    hundredths = {entry.positions[0] * _LINES_PER_EPOCH // num_samples for entry in (last, step)}
    if not continues or len(hundredths) > 1:
        return [*entries, step]
    joined = replace(
        last,
        steps=(last.steps[0], step.steps[1]),
        positions=(last.positions[0], step.positions[1]),
        fingerprint=added([last.fingerprint, step.fingerprint]),
    )
    return [*others, joined]


def parse(line: str | bytes, source: str) -> Entry:
    """Return the entry in a line. Raises UsageError, naming `source`, if it holds none."""
    try:
        values: dict[str, Any] = json.loads(line)
        epoch, world_size = _numbers((values["epoch"], values["world_size"]))
        (first, last), (start, stop) = _numbers(values["steps"]), _numbers(values["positions"])
        entry = Entry(epoch, (first, last), world_size, (start, stop), int(values["fingerprint"], 16))
        if "data_changed" not in values:
            return entry
        before, after = (max(number, 1) for number in _numbers(values["data_changed"]))
        return replace(entry, data_changed=(before, after))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise UsageError(f"{source} is not a step of a ledger") from None


def _numbers(values: Iterable[Any]) -> list[int]:
    """Return the whole numbers in a part of a line. Raises ValueError if one is larger than any of a run."""
    numbers = list(map(int, values))
    if not all(-(2**63) <= number < 2**63 for number in numbers):
        raise ValueError("too large")
    return numbers


def read(path: Path) -> Iterator[Entry]:
    """Yield the entries of a ledger, without a torn last line: a killed process leaves one.

    Raises UsageError if another line is not an entry, and OSError if the file cannot be read.
    """
    with plain_file.opened(path) as file:
        for number, line in enumerate(plain_file.lines(file), 1):
            try:
                entry = parse(line, f"{path}: line {number}")
            except UsageError:
                if line.endswith(b"\n"):
                    raise
                return
            yield entry


@dataclass(frozen=True)
class Audit:
    """What a ledger proves: `faults` has a line for each deviation and is empty if the training was exact."""

    epochs: int
    """Finished epochs."""
    steps: int
    num_samples: int
    """Size of the training set, after all `changes` of it."""
    world_sizes: tuple[int, ...]
    """All world sizes that took part, in rising order."""
    faults: tuple[str, ...]
    repetitions: int = 1
    """With repeated augmentation each sample comes this often in this many epochs, which are judged as one."""
    changes: tuple[str, ...] = ()
    """A line for each epoch that ended early because the training set was changed."""

    def __str__(self) -> str:
        if self.faults:
            return "NOT exact: " + "; ".join(self.faults[:3])
        sizes = ", ".join(str(size) for size in self.world_sizes)
        times = self.repetitions
        counted = "once in each" if times == 1 else f"{times} times in {times} epochs,"
        samples = "every sample" if self.changes else f"every one of {self.num_samples:,} samples"
        return (
            f"exact: {samples} counted {counted} of {self.epochs} finished epochs "
            f"({self.steps:,} steps, world sizes {sizes}){''.join(f'; {change}' for change in self.changes)}"
        )


def audit(folder: Path) -> Audit:
    """Check the ledger of a run folder.

    Raises UsageError if there is no ledger, if a line of it is not an entry, or if metrics.jsonl does not say how many
    samples the training set has, and in which order they come.
    """
    path, metrics = folder / LEDGER, folder / METRICS
    if not path.exists():
        raise UsageError(f"{folder} has no {LEDGER}: train with --ledger to have one")
    try:
        start = _last_event(metrics, "start", "num_samples")
        facts: list[Any] = [start.get(name) for name in ("num_samples", "repeated_augmentation", "seed")]
        if not all(type(fact) is int and least <= fact < 2**63 for fact, least in zip(facts, (1, 1, 0), strict=True)):
            raise UsageError(
                f"{metrics} does not say how many samples the training set has, or in which order they come: "
                "the ledger cannot be judged"
            )
        num_samples, repetitions, seed = facts
        if changes := [entry.data_changed for entry in read(path) if entry.data_changed]:
            num_samples = changes[0][0]
        if (total := max([num_samples, *(after for _, after in changes)]) * repetitions) > _MOST_SAMPLES:
            raise UsageError(f"{metrics} has {total:,} samples, an audit counts at most {_MOST_SAMPLES:,}")
        from_step = _last_event(metrics, FROM_FILE, "step").get("step")
        return audit_entries(
            read(path), num_samples, repetitions, seed, from_step if isinstance(from_step, int) else None
        )
    except OSError as error:
        raise UsageError(f"cannot read {error.filename or folder}: {error.strerror}") from None


def audit_entries(
    entries: Iterable[Entry], num_samples: int, repetitions: int = 1, seed: int = 0, from_step: int | None = None
) -> Audit:
    """Check that each step comes once and in order, and in each finished epoch each sample once.

    The last epoch may be unfinished: samples may be missing there, but none may come twice. With repeated augmentation
    `repetitions` epochs are judged as one round, in which each sample comes `repetitions` times. `seed` is the seed of
    the order. The check ends after a hundred faults. A run that resumed from a file after `from_step` is judged from
    there, or from the beginning of that epoch if the file had it.
    """
    judge = _Judge(num_samples, repetitions, seed, from_step)
    for entry in entries:
        judge.take(entry)
        if judge.is_lost:
            break
    return judge.verdict()


@dataclass(frozen=True)
class _Count:
    """How often the samples of a round came."""

    too_often: int
    too_rarely: int
    unknown: int
    taken: int
    """Positions in all."""


class _Judge:
    """Judge the entries of a ledger one by one; of these, hold one round: the epochs judged as one.

    The fingerprints of a finished round must add up to the fingerprint of all samples, which does not depend on the
    order. If they do not, and in an unfinished round, each is compared with the fingerprint of the samples at the
    entry's positions. The order is a permutation, so each sample comes once if each position does.
    """

    def __init__(self, num_samples: int, repetitions: int, seed: int, from_step: int | None) -> None:
        self._num_samples, self._repetitions, self._seed, self._from_step = num_samples, repetitions, seed, from_step
        self._faults, self._changes, self._world_sizes = list[str](), list[str](), set[int]()
        self._lines = self._steps = self._last_step = self._finished = self._round = 0
        self._partial = set[int]()  # rounds that a change of the data or another run's ledger has a part of
        self._in_order = True
        self._entries: list[Entry] = []

    def take(self, entry: Entry) -> None:
        """Judge the next entry."""
        self._lines += 1
        (first, last), number = entry.steps, entry.epoch // self._repetitions
        if self._lines == 1 and self._from_step is not None and first <= self._from_step + 1:
            self._last_step, self._round = first - 1, number
            if entry.epoch % self._repetitions or entry.positions[0]:
                self._partial.add(number)
        if first != self._last_step + 1 and self._in_order:
            self._in_order = False
            self._faults.append(f"line {self._lines} is of step {first}")
        self._last_step, self._steps = last, self._steps + last - first + 1
        while self._round < number and not self.is_lost:
            self._end_round()
        if entry.data_changed:
            self._change_data(entry.epoch, entry.data_changed[1])
            return
        self._world_sizes.add(entry.world_size)
        if number < self._round:
            self._faults.append(f"line {self._lines} is of epoch {entry.epoch}, after a later one")
        else:
            self._entries.append(entry)

    @property
    def is_lost(self) -> bool:
        """Whether there are too many faults to list."""
        return len(self._faults) > _MOST_FAULTS

    def verdict(self) -> Audit:
        """Return the verdict on all entries. Call it last."""
        self._end_round(may_lack=True)
        sizes = tuple(sorted(self._world_sizes))
        faults, changes = tuple(self._faults), tuple(self._changes)
        return Audit(self._finished, self._steps, self._num_samples, sizes, faults, self._repetitions, changes)

    def _change_data(self, epoch: int, num_samples: int) -> None:
        """End the epoch, and judge later ones by the new number of samples.

        With repeated augmentation a change may cut a round in two; both parts may lack samples.
        """
        if self._entries:
            count, total = self._end_round(may_lack=True), self._num_samples * self._repetitions
            if count.too_rarely:
                early = f"epoch {epoch + 1} ended after {count.taken:,} of {total:,} samples"
                self._changes.append(f"{early} because the data changed")
        self._num_samples = num_samples
        self._round, rest = divmod(epoch + 1, self._repetitions)
        if rest:
            self._partial.add(self._round)

    def _end_round(self, *, may_lack: bool = False) -> _Count:
        """Judge the entries of the round, and begin the next one."""
        may_lack = may_lack or self._round in self._partial
        times, epoch, count = self._repetitions, self._round * self._repetitions, self._count()
        name = f"epoch {epoch}" if times == 1 else f"epochs {epoch} to {epoch + times - 1}"
        is_whole = not (count.too_often or count.too_rarely or count.unknown)
        if not is_whole or added(entry.fingerprint for entry in self._entries) != _of_all(self._num_samples * times):
            self._faults += [
                f"{_named(entry.steps)}: not the samples that stand at positions {entry.positions[0]} to "
                f"{entry.positions[1] - 1} of epoch {entry.epoch}"
                for entry in self._wrong()
            ]
        if count.too_often or count.unknown:
            self._faults.append(
                f"{name}: {count.too_often} samples more than {_times(times)}, {count.unknown} that do not exist"
            )
        if count.too_rarely and not may_lack:
            never = "never" if times == 1 else f"less than {_times(times)}"
            self._faults.append(f"{name}: {count.too_rarely} samples {never}")
        if not count.too_rarely:
            self._finished += times
        elif may_lack and times > 1:
            self._finished += count.taken // self._num_samples
        self._round += 1
        self._entries = []
        return count

    def _count(self) -> _Count:
        """Count the positions of the round that entries name, each of which stands for a sample."""
        often = unknown = taken = 0
        epochs: dict[int, list[tuple[int, int]]] = {}
        for entry in self._entries:
            epochs.setdefault(entry.epoch, []).append(entry.positions)
        rarely = self._num_samples * (self._repetitions - len(epochs))
        for positions in epochs.values():
            reached = 0
            for start, stop in sorted(positions):
                often += max(0, min(reached, stop) - start)
                rarely += max(0, start - reached)
                reached = max(reached, stop)
                taken += stop - start
            rarely += max(0, self._num_samples - reached)
            unknown += max(0, reached - self._num_samples)
        return _Count(min(often, self._num_samples), min(rarely, self._num_samples), unknown, taken)

    def _wrong(self) -> Iterator[Entry]:
        """Yield the entries whose steps did not take the samples at their positions.

        Stop once the entries have more positions than the round, so that some come twice, which is a fault already. A
        short file could otherwise claim enough to keep an audit busy for days.
        """
        room = self._num_samples * self._repetitions
        for entry in self._entries:
            order = order_of(self._seed, entry.epoch, self._num_samples, self._repetitions)
            positions = range(max(0, entry.positions[0]), min(entry.positions[1], self._num_samples))
            parts = (order[begin : min(begin + _AT_ONCE, positions.stop)] for begin in positions[::_AT_ONCE])
            if added(map(fingerprint, parts)) != entry.fingerprint:
                yield entry
            room -= len(positions)
            if room < 0:
                return


def _named(steps: tuple[int, int]) -> str:
    first, last = steps
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _last_event(path: Path, name: str, fact: str) -> dict[str, Any]:
    """Return the last event of this name with this fact in metrics.jsonl; an empty one if there is none."""
    found: dict[str, Any] = {}
    if path.exists():
        with plain_file.opened(path) as file:
            for line in plain_file.lines(file):
                if f'"{name}"'.encode() not in line:
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(record, dict) and record.get("name") == name and fact in record:
                    found = record
    return found
