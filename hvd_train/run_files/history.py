"""Read a run folder: settings, metrics, events, and the state of the run."""

import json
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from hvd_train import config_file, plain_file
from hvd_train.errors import UsageError
from hvd_train.progress.metrics import FACTS
from hvd_train.run_files import run_folder

Record = Mapping[str, Any]  # a line of metrics.jsonl, or another JSON file
# x and y values, equally many; None leaves a gap
Curve = tuple[list[float | None], list[float | None]]
LARGEST = 1e18  # larger numbers are damage
_SHORTEST = 1e-6  # seconds: a shorter step is damage
# events that a process writes before it trains
_FIRST = ("note", "lost", run_folder.FROM_FILE, "start")
_MOST_POINTS = 120  # of a curve: a chart is a few hundred pixels wide


@dataclass(frozen=True)
class History:
    """A run as its files describe it.

    Records have three more fields: `elapsed`, the seconds of training without pauses before a
    resume, and `samples_done` and `epochs_done`, the progress until then; `epochs_done` is None if
    unknown.
    """

    path: Path
    settings: Mapping[str, Any]  # the values of config.yaml
    steps: tuple[Record, ...]
    epochs: tuple[Record, ...]
    events: tuple[Record, ...]
    samples_per_epoch: int | None
    summary: Record  # of summary.json; empty if the run has not finished
    environment: Record  # of environment.json; empty if there is none
    last_write: float | None  # the time of the last record, in seconds since 1970

    @property
    def name(self) -> str:
        """Return the name of the run's folder."""
        return self.path.resolve().name

    @cached_property
    def state(self) -> str:
        """Return running, finished, stopped, broke off or unknown; a reason may follow."""
        last = last_event(self.events, "start", "end", "world")
        ended = last.get("name") == "end"
        if ended and str(last.get("message")).startswith("stopped"):
            return "stopped; the same command continues it"
        if not ended and run_folder.in_use(self.path):
            return "running"
        if ended or self.summary:
            why = self.summary.get("why")
            return "finished" if why in (None, "done") else f"finished: {why}"
        here = self.environment.get("host") in (None, socket.gethostname())
        return "broke off (killed or failed)" if here else "unknown: it ran on another machine"

    @property
    def ended(self) -> bool:
        """Return whether the run writes nothing more unless it is resumed."""
        return not self.state.startswith(("running", "unknown"))

    @property
    def num_epochs(self) -> int | None:
        """Return the number of epochs in the settings, or None if unknown."""
        return whole(self.settings.get("epochs"))

    @property
    def world_size(self) -> int | None:
        """Return the latest number of ranks, or None if unknown."""
        return whole(last_event(self.events, "start", "world", fact="world_size").get("world_size"))

    @property
    def measures(self) -> tuple[str, ...]:
        """Return the names of the measures of training and validation, the loss first."""
        names = (
            name.removeprefix("val_")
            for of in (self.steps, self.epochs)
            for name in (of[-1] if of else ())
        )
        return tuple(
            dict.fromkeys(
                ["loss", *(name for name in names if name not in FACTS and name.isidentifier())]
            )
        )

    @property
    def goal(self) -> tuple[str, bool]:
        """Return the name of the figure that decides which evaluation is the best,
        and whether more is better.
        """
        return str(self._start.get("best", "top1")), bool(self._start.get("higher", True))

    @property
    def sample(self) -> str:
        """Return the name of a sample."""
        return str(self._start.get("sample", "image"))

    @property
    def _start(self) -> Record:
        return last_event(self.events, "start")

    @property
    def seconds(self) -> float:
        """Return the seconds of training until the last record."""
        return max(numbers((*self.steps, *self.epochs, *self.events), "elapsed"), default=0.0)

    def mappings(self, field: str) -> list[Record]:
        """Return the values of a field of steps that are mappings."""
        return [step[field] for step in self.steps if isinstance(step.get(field), dict)]

    def furthest(self, name: str) -> float:
        """Return the largest value of a field of steps and epochs, or 0."""
        return max(numbers((*self.steps, *self.epochs), name), default=0.0)


def read(path: Path) -> History:
    """Read a run folder.

    Raises UsageError if `path` is none, or if one of its files cannot be read.
    """
    if not path.is_dir():
        raise UsageError(f"{path}: no such run folder")
    if not (path / run_folder.CONFIG).exists() and not (path / run_folder.METRICS).exists():
        raise UsageError(f"{path} is not a run of hvd_train: it has no {run_folder.CONFIG}")
    try:
        settings = mapping_in(path / run_folder.CONFIG, config_file.parse)
        summary = mapping_in(path / run_folder.SUMMARY, json.loads)
        environment = mapping_in(path / run_folder.ENVIRONMENT, json.loads)
        records = [record for _, record in lines(path / run_folder.METRICS)]
    except OSError as error:
        raise UsageError(f"cannot read {error.filename or path}: {error.strerror}") from None
    steps, epochs, events = (
        tuple(record for record in records if record.get("kind") == kind)
        for kind in ("step", "epoch", "event")
    )
    start = last_event(events, "start")
    per_epoch = whole(start.get("epoch_samples", start.get("num_samples")))
    _add_progress(records, per_epoch)
    last_write = max((record["time"] for record in records), default=None)
    return History(
        path, settings, steps, epochs, events, per_epoch, summary, environment, last_write
    )


def last_event(events: Sequence[Record], *names: str, fact: str = "name") -> Record:
    """Return the last event with one of these names and with this fact, or {}."""
    return next(
        (event for event in reversed(events) if event.get("name") in names and fact in event), {}
    )


def number(record: Record, name: str) -> float | None:
    """Return a finite number in a field of a record, or None."""
    value = record.get(name)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST:
        return float(value)
    return None


def numbers(records: Iterable[Record], name: str) -> list[float]:
    """Return the finite numbers in a field of records."""
    return [value for record in records if (value := number(record, name)) is not None]


def whole(value: object) -> int | None:
    """Return `value` if it is a whole number above 0, else None."""
    return (
        value
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < LARGEST
        else None
    )


def speeds(steps: Sequence[Record], most: int = _MOST_POINTS) -> Curve:
    """Return samples/s (y) over seconds of training (x), in at most `most` points."""
    intervals = []
    for before, after in pairwise(steps):
        samples = (number(after, "samples") or 0.0) - (number(before, "samples") or 0.0)
        seconds = after["elapsed"] - before["elapsed"]
        if before.get("epoch") == after.get("epoch") and samples > 0 and seconds > _SHORTEST:
            intervals.append((before["elapsed"] + seconds / 2, samples, seconds))
    size = -(-len(intervals) // most) or 1
    x = list[float | None]()
    y = list[float | None]()
    for at in range(0, len(intervals), size):
        middles, samples_of, times = zip(*intervals[at : at + size], strict=True)
        x.append(fmean(middles))
        y.append(sum(samples_of) / sum(times))
    return x, y


def thinned(values: Sequence[float | None], most: int = _MOST_POINTS) -> list[float | None]:
    """Return at most `most` values, each the mean of neighbours or a gap."""
    size = -(-len(values) // most) or 1
    means = list[float | None]()
    for at in range(0, len(values), size):
        known = [value for value in values[at : at + size] if value is not None]
        means.append(fmean(known) if known else None)
    return means


def mapping_in(path: Path, parse: Callable[[str], object]) -> dict[str, Any]:
    """Return the values in a file; none without a file."""
    try:
        values = parse(plain_file.read_text(path, config_file.MOST_BYTES))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UsageError(f"{path} is damaged: move it away")
    return values


def lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each line of a metrics.jsonl with its record, without torn lines: a process may have
    been killed, or writes this moment.
    """
    for line in plain_file.read_bytes(path).splitlines(keepends=True) if path.exists() else ():
        with suppress(ValueError, RecursionError):
            record = json.loads(line.decode(errors="replace"))
            if isinstance(record, dict) and number(record, "time") is not None:
                yield line, record


def _add_progress(lines: Sequence[dict[str, Any]], per_epoch: int | None) -> None:
    """Add `elapsed`, `samples_done` and `epochs_done` to each line.

    Time before a process's first lines is a pause.
    """
    elapsed = 0.0
    before = None
    done = 0.0
    for line in lines:
        if before is not None and line.get("name") not in _FIRST:
            elapsed += max(0.0, line["time"] - before)
        epoch = number(line, "epoch")
        before = line["time"]
        if line.get("kind") == "step":
            done = number(line, "samples") or done
        elif line.get("kind") == "epoch" and epoch and per_epoch:
            done = epoch * per_epoch
        line |= {
            "elapsed": elapsed,
            "samples_done": done,
            "epochs_done": done / per_epoch if per_epoch else None,
        }
