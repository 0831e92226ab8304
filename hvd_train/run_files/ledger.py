"""Record the samples and answers of finished steps in ledger.jsonl, and audit it.

A line has the positions of one or more steps in the epoch's order, and a fingerprint of the samples
that all loaders delivered. The fingerprints of an epoch add up to the fingerprint of all samples
only if each sample came once. Samples that are drawn by weight have the fingerprint of their draws.
The answer of a step is what all ranks have computed in it.
"""

import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hvd_train import plain_file
from hvd_train.console import say
from hvd_train.data import per_sample
from hvd_train.errors import UsageError
from hvd_train.progress.metrics import Totals
from hvd_train.progress.order import ORDERS, UNDECIDED, Order, added, fingerprint
from hvd_train.progress.sampling import Numbers, drawn_by
from hvd_train.run_files import history
from hvd_train.run_files.run_folder import FROM_FILE, METRICS, WEIGHTS, RunFolder

LEDGER = "ledger.jsonl"
WEIGHTED = "weighted"  # the name of an order that draws samples by weight
_LINES_PER_EPOCH = 100  # without a change of world
_AT_ONCE = 1 << 20  # samples that an audit looks up at once
_MOST_FAULTS = 3
_ANSWER = struct.Struct("<ffI")
_DIGITS = 2 * _ANSWER.size  # of the answer of a step
_OF_DIGEST = 8  # the last digits
_NORM_ROUNDS = 2.0**-16  # relative: float32 sums of the squares of 2^18 numbers


@dataclass(frozen=True)
class StepAnswer:
    """What all ranks have computed in a step."""

    loss: float  # mean over the samples, rounded to float32
    gradient_norm: float  # rounded to float32
    digest: int  # of the sums of loss and measures in all steps until this one

    def gaps(self, other: "StepAnswer") -> tuple[float, float]:
        """Return by how much loss and gradient norm differ, relative to the larger one or to 1."""
        return (
            _gap(self.loss, other.loss),
            _gap(self.gradient_norm, other.gradient_norm),
        )

    def is_same(self, other: "StepAnswer") -> bool:
        """Return whether all sums until this step have the same bits.

        The norm may be rounded in another way: the first step after a resume adds up its squares in
        another order, which changes no weight.
        """
        loss, norm = self.gaps(other)
        is_rounded = math.isclose(self.gradient_norm, other.gradient_norm, rel_tol=_NORM_ROUNDS)
        return self.digest == other.digest and loss == 0 and (norm == 0 or is_rounded)


def _gap(one: float, other: float) -> float:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    gap = abs(one - other) / max(1.0, abs(one), abs(other))
    return gap if math.isfinite(gap) else math.inf


def in_digits(loss: float, gradient_norm: float, totals: Totals, before: str) -> str:
    """Return the answer of a step in hexadecimal digits; `before` ends with the digits of the step
    before, if it has any.
    """
    numbers = np.array([loss, gradient_norm, *totals.sums.values(), *totals.divisors.values()])
    numbers[np.isnan(numbers)] = np.nan  # processors give it either sign
    chained = before[-_OF_DIGEST:].encode() + numbers[2:].astype("<f8").tobytes()
    with np.errstate(over="ignore"):
        rounded = numbers[:2].astype("<f4")
    return _ANSWER.pack(*rounded.tolist(), xxhash.xxh32_intdigest(chained)).hex()


@dataclass(frozen=True)
class Entry:
    """Finished steps in a row, in one epoch and with one world size."""

    epoch: int  # counted from 0
    steps: tuple[int, int]  # the first and the last, counted from 1 over the whole run
    world_size: int
    positions: tuple[int, int]  # in the epoch's order: the first one, and the one after the last
    fingerprint: int  # of the samples that all ranks took
    answers: str = ""  # of the steps, by `in_digits`
    # digests of the states that ranks compared, by steps and epochs done: "330/2"
    states: Mapping[str, str] = field(default_factory=dict)

    def with_state(self, step: int, epochs_done: int, digest: str) -> "Entry":
        """Return the entry with the digest of a state after its last step."""
        return replace(self, states={**self.states, f"{step}/{epochs_done}": digest})

    def line(self) -> str:
        """Return the entry as a line of ledger.jsonl."""
        values = {**vars(self), "fingerprint": f"{self.fingerprint:016x}"}
        if not self.states:
            del values["states"]
        return json.dumps(values) + "\n"

    def answers_by_step(self) -> dict[int, StepAnswer]:
        """Return the answer of each step by its number; empty if there is none."""
        answers = _ANSWER.iter_unpack(bytes.fromhex(self.answers))
        return {step: StepAnswer(*answer) for step, answer in enumerate(answers, self.steps[0])}


def extended(entries: Sequence[Entry], step: Entry, num_samples: int) -> list[Entry]:
    """Return an epoch's entries with one more step.

    Steps in the same hundredth of the epoch and world are joined.
    """
    if not entries or entries[-1].epoch != step.epoch:
        return [step]
    *others, last = entries
    end = last.world_size, last.steps[1] + 1, last.positions[1]
    hundredths = {entry.positions[0] * _LINES_PER_EPOCH // num_samples for entry in (last, step)}
    if end != (step.world_size, step.steps[0], step.positions[0]) or len(hundredths) > 1:
        return [*entries, step]
    steps = (last.steps[0], step.steps[1])
    positions = (last.positions[0], step.positions[1])
    fingerprint = added([last.fingerprint, step.fingerprint])
    joined = replace(
        last,
        steps=steps,
        positions=positions,
        fingerprint=fingerprint,
        answers=last.answers + step.answers,
    )
    return [*others, joined]


def parse(line: str | bytes, source: str) -> Entry:
    """Return the entry in a line. Raises UsageError, naming `source`, if it holds none."""
    try:
        values: dict[str, Any] = json.loads(line)
        (first, last), (start, stop) = map(int, values["steps"]), map(int, values["positions"])
        epoch = int(values["epoch"])
        world_size = int(values["world_size"])
        samples = int(values["fingerprint"], 16)
        if max(epoch, first, last, world_size, start, stop) >= 2**63 or last < first:
            raise ValueError("too large, or no step")
        answers = values.get("answers", "")
        digits = bytes.fromhex(answers).hex()
        if answers != digits or len(digits) not in (0, _DIGITS * (last - first + 1)):
            raise ValueError("other digits, or as many as another number of steps has")
        states = {place: str(digest) for place, digest in values.get("states", {}).items()}
        if not all(re.fullmatch("[0-9]{1,18}/[0-9]{1,18}", place) for place in states):
            raise ValueError("no steps and epochs")
        return Entry(epoch, (first, last), world_size, (start, stop), samples, answers, states)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise UsageError(f"{source} is not a step of a ledger") from None


def read(path: Path) -> Iterator[Entry]:
    """Yield the entries of a ledger, without a torn last line.

    Raises UsageError for other damage, and OSError.
    """
    for number, line in enumerate(plain_file.read_bytes(path).splitlines(keepends=True), 1):
        if line.endswith(b"\n"):
            yield parse(line, f"{path}: line {number}")


def answers_in(folder: Path) -> dict[int, StepAnswer]:
    """Return the answers in the ledger of a run folder, by step; empty if there are none.

    Raises UsageError if the ledger is damaged.
    """
    found = dict[int, StepAnswer]()
    for entry in _entries_in(folder):
        found |= entry.answers_by_step()
    return found


def states_in(folder: Path) -> dict[tuple[int, int], str]:
    """Return the digests of states in the ledger of a run folder, by steps and epochs done.

    Raises UsageError if the ledger is damaged.
    """
    found = {}
    for entry in _entries_in(folder):
        for place, digest in entry.states.items():
            step, epochs_done = place.split("/")
            found[int(step), int(epochs_done)] = digest
    return found


def world_sizes_in(folder: Path) -> str:
    """Return the numbers of ranks in the ledger of a run folder, and since which step; empty
    without a ledger.

    Raises UsageError if the ledger is damaged.
    """
    found = list[str]()
    last = 0
    for entry in _entries_in(folder):
        if entry.world_size != last:
            found.append(f"{entry.world_size} from step {entry.steps[0]}")
            last = entry.world_size
    return ", ".join(found)


def _entries_in(folder: Path) -> list[Entry]:
    path = folder / LEDGER
    try:
        return [*read(path)] if path.exists() else []
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


@dataclass(frozen=True)
class Audit:
    """The result of an audit: `faults` is empty if the training was exact."""

    epochs: int  # finished ones
    steps: int
    num_samples: int  # in the training set
    world_sizes: tuple[int, ...]  # in rising order
    faults: tuple[str, ...]  # a line for each of the first ones
    epoch_samples: int  # fewer with --drop-last
    drawn: bool = False  # by weight, so that a sample may count several times, or never

    def __str__(self) -> str:
        if self.faults:
            return "NOT exact: " + "; ".join(self.faults)
        which = f"every one of {self.num_samples:,} samples counted"
        if self.epoch_samples < self.num_samples:
            which = (
                f"{self.epoch_samples:,} of {self.num_samples:,} samples counted, without the "
                "last of their order,"
            )
        if self.drawn:
            which = f"all {self.epoch_samples:,} draws by weight counted as drawn,"
        return (
            f"exact: {which} once in each of {self.epochs} finished epochs "
            f"({self.steps:,} steps, world sizes {', '.join(map(str, self.world_sizes))})"
        )


def audit(folder: Path) -> Audit:
    """Check the ledger of a run folder.

    Raises UsageError if it or another file is missing or damaged.
    """
    path = folder / LEDGER
    if not path.exists():
        raise UsageError(f"{folder} has no {LEDGER}: train with --ledger to have one")
    try:
        events = history.read(folder).events
        start = history.last_event(events, "start", fact="num_samples")
        num_samples = history.whole(start.get("num_samples"))
        seed = start.get("seed")
        if num_samples is None or not isinstance(seed, int):
            raise UsageError(
                f"{folder / METRICS} lacks the number of samples or the seed: cannot judge"
            )
        order = str(start.get("order", "shuffled"))
        weights = None
        if order == WEIGHTED:
            file = folder / WEIGHTS
            weights = per_sample.checked(str(file), per_sample.read(str(file), file), num_samples)
        step = history.last_event(events, FROM_FILE, fact="step").get("step")
        return audit_entries(
            read(path),
            num_samples,
            seed,
            step if isinstance(step, int) else None,
            history.whole(start.get("epoch_samples")),
            order,
            weights,
        )
    except OSError as error:
        raise UsageError(f"cannot read {error.filename or folder}: {error.strerror}") from None


def audit_entries(
    entries: Iterable[Entry],
    num_samples: int,
    seed: int = 0,
    from_step: int | None = None,
    epoch_samples: int | None = None,
    order: str = "shuffled",
    weights: Numbers | None = None,
) -> Audit:
    """Check that steps take all positions of each epoch in order, the samples at these
    positions, and all samples.

    The last epoch may lack positions. `seed` decides the order. A run that resumed from a file
    after `from_step` may begin in the middle of an epoch. With `epoch_samples` each epoch ends at
    that position. With `weights` samples are drawn by them. The samples at positions of another
    order that is not in ORDERS, the user's own, are not known.
    """
    size = epoch_samples or num_samples
    orders = ORDERS.get(order) if weights is None else drawn_by(weights)
    has_all = size == num_samples and weights is None
    faults = list[str]()
    world_sizes = set[int]()
    finished = 0
    steps = 0
    next_place = (0, 1, 0)  # the epoch, step and position at which the next entry begins
    is_whole = True
    total = 0  # of the epoch's fingerprints so far
    for line, entry in enumerate(entries, 1):
        (first, last), (start, stop) = entry.steps, entry.positions
        begin = (entry.epoch, first, start)
        if line == 1 and from_step is not None and first <= from_step + 1:
            next_place = begin
            is_whole = start == 0
        place = f"line {line}: {_named(*begin)}"
        if begin != next_place:
            faults.append(f"{place}, not {_named(*next_place)}")
        elif not 0 <= start < stop <= size:
            faults.append(f"{place} takes samples up to position {stop - 1} of {size}")
        elif (
            orders
            and _fingerprint(orders(seed, entry.epoch, num_samples, UNDECIDED), start, stop)
            != entry.fingerprint
        ):
            faults.append(
                f"{place} to step {last} at position {stop - 1}: not the samples that stand there"
            )
        total = added([total if start else 0, entry.fingerprint])
        steps += last - first + 1
        world_sizes.add(entry.world_size)
        next_place = (entry.epoch, last + 1, stop)
        if stop == size:
            if is_whole and not faults and has_all and total != _of_all(num_samples):
                faults.append(f"line {line}: epoch {entry.epoch} does not have all samples")
            finished += is_whole
            next_place = (entry.epoch + 1, last + 1, 0)
            is_whole = True
        if len(faults) == _MOST_FAULTS:
            break
    return Audit(
        finished,
        steps,
        num_samples,
        tuple(sorted(world_sizes)),
        tuple(faults),
        size,
        weights is not None,
    )


def _named(epoch: int, step: int, position: int) -> str:
    return f"step {step} at position {position} of epoch {epoch}"


def _fingerprint(order: Order, start: int, stop: int) -> int:
    return added(
        fingerprint(order[at : min(at + _AT_ONCE, stop)]) for at in range(start, stop, _AT_ONCE)
    )


@lru_cache
def _of_all(num_samples: int) -> int:
    return _fingerprint(Order(num_samples), 0, num_samples)


class LedgerFile:
    """Writes an entry when the next one begins: until then steps may join
    it, and the state holds it.

    Entries that do not fit on the disk are kept, and written before the next ones.
    """

    def __init__(
        self, folder: RunFolder, epochs_done: int, report: Callable[[str], None] = say
    ) -> None:
        """Open the ledger in `folder` and remove entries of epochs that have not ended.

        `took` gets these again from the state. Raises OSError, and UsageError if the file holds
        anything but entries.
        """
        self._folder = folder
        self._path = folder.path / LEDGER
        self._report = report
        self._last_step = 0  # in the file
        self._unwritten = list[Entry]()
        if self._path.exists():
            kept = [entry for entry in read(self._path) if entry.epoch < epochs_done]
            # a full disk has no room for a new file
            with open(self._path, "r+b", opener=plain_file.in_place) as file:
                file.truncate(sum(len(entry.line()) for entry in kept))
            self._last_step = kept[-1].steps[1] if kept else 0
        self._file = folder.append(LEDGER, report)

    def took(self, entry: Entry) -> None:
        """Record a new or extended entry."""
        if entry.steps[1] > self._last_step:
            if self._unwritten and self._unwritten[-1].steps[0] == entry.steps[0]:
                self._unwritten.pop()
            else:
                self.complete()
            self._unwritten.append(entry)

    def complete(self) -> bool:
        """Write all entries, also the one that steps may still join; return
        whether they fit on the disk.
        """
        while self._unwritten and self._folder.held():
            entry = self._unwritten[0]
            if not self._file.write(entry.line().encode()):
                break
            self._last_step = entry.steps[1]
            del self._unwritten[0]
        return not self._unwritten

    def sync(self, epochs_done: int) -> None:
        """Force the entries of ended epochs, which no step joins any more, to disk."""
        if self._unwritten and self._unwritten[-1].epoch < epochs_done:
            self.complete()
        self._file.sync()

    def close(self) -> None:
        """Write all entries, and close the file."""
        self.complete()
        self._file.close()
        if self._unwritten and self._folder.held():
            self._report(
                f"{self._path} ends before step {self._unwritten[0].steps[0]}: the disk is full"
            )
