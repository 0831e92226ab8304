"""A run folder read back: settings, metrics, events and how the run ended. What is missing or damaged is named."""

from __future__ import annotations

import bisect
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hvd_train import config_file, plain_file
from hvd_train.errors import UsageError
from hvd_train.progress.clock import PHASES
from hvd_train.run_files import run_folder

Record = Mapping[str, Any]
"""A line of metrics.jsonl, or the whole of another JSON file."""

Curve = tuple[list[float | None], list[float | None]]
"""The x and the y values of a curve, as many of each; None leaves a gap."""
_LARGEST = 1e18  # no record of a run has a number as large
_MOST_JSON = 2**24  # bytes
_MOST_POINTS = 120  # of a curve: a chart is a few hundred pixels wide


@dataclass(frozen=True)
class History:
    """A run as its files describe it.

    Steps, epochs and events are the records of metrics.jsonl. Each has a field `elapsed` besides: the seconds that the
    run had trained until then, without the time between its end and the moment it was resumed.
    """

    path: Path
    settings: Mapping[str, Any]
    """The values of config.yaml by their names, without the groups that they stand in."""
    steps: tuple[Record, ...]
    epochs: tuple[Record, ...]
    events: tuple[Record, ...]
    summary: Record
    """The content of summary.json; empty where the run has not come to its end."""
    environment: Record
    """The content of environment.json; empty where there is none."""
    gaps: tuple[str, ...]
    """A line for each thing that is missing or cannot be read, with the reason."""
    state: str
    """running, finished, stopped, broke off (killed, failed), or unknown, where it ran on another machine."""
    last_write: float | None
    """The time of the last record, in seconds since 1970; None where there is no record."""

    @property
    def name(self) -> str:
        """Return the name of the run's folder."""
        return self.path.resolve().name

    @property
    def ended(self) -> bool:
        """Return whether nothing more will come unless the run is started again."""
        return self.state not in ("running", "unknown")

    @property
    def num_epochs(self) -> int | None:
        """Return how many epochs the run is to have, or None where its settings do not say."""
        return whole(self.settings.get("epochs"))

    @property
    def samples_per_epoch(self) -> int | None:
        """Return how many samples an epoch has, or None where no event says."""
        return next((whole(e.get("num_samples")) for e in reversed(self.events) if e.get("name") == "start"), None)

    @property
    def world_size(self) -> int | None:
        """Return how many ranks the run has, or had at last; None where no event says."""
        sizes = (whole(e.get("world_size")) for e in reversed(self.events) if e.get("name") in ("start", "world"))
        return next((size for size in sizes if size), None)

    @property
    def seconds(self) -> float:
        """Return the seconds that the run has trained, until its last record."""
        return max((record["elapsed"] for record in (*self.steps, *self.epochs, *self.events)), default=0.0)

    def samples_at(self, step: float) -> float | None:
        """Return how many samples the run had taken after a step, interpolated between its step records.

        Beyond the last record the count is extrapolated. None where there is no step record to go by.
        """
        known = self._samples_of_steps
        if len(known) < 2:
            return None
        index = min(max(bisect.bisect_left(known, (step, -1.0)), 1), len(known) - 1)
        (low, before), (high, after) = known[index - 1], known[index]
        return before + (after - before) * (step - low) / (high - low) if high > low else after

    @cached_property
    def _samples_of_steps(self) -> list[tuple[float, float]]:
        pairs = ((number(record, "step"), number(record, "samples")) for record in self.steps)
        return [(0.0, 0.0), *((step, samples) for step, samples in pairs if step and samples is not None)]


def read(path: Path) -> History:
    """Read a run folder; a damaged or missing file in it is a gap. Raises UsageError where `path` is no run folder."""
    if not path.exists():
        raise UsageError(f"{path}: no such run folder")
    if not path.is_dir():
        raise UsageError(f"{path} is a file; name a run folder")
    if not (path / run_folder.CONFIG).exists() and not (path / run_folder.METRICS).exists():
        inside = sorted(entry.parent for entry in path.glob(f"*/{run_folder.CONFIG}"))
        hint = f"; its folders are: name them, as in {path}/*" if inside else ""
        raise UsageError(f"{path} is not a run of hvd_train: it has no {run_folder.CONFIG}{hint}")
    gaps: list[str] = []
    settings = _settings(path / run_folder.CONFIG, gaps)
    lines = _with_seconds(_lines(path / run_folder.METRICS, gaps))
    summary = _json(path / run_folder.SUMMARY, gaps)
    environment = _json(path / run_folder.ENVIRONMENT, gaps)
    if not environment:
        gaps.append(f"no {run_folder.ENVIRONMENT}: the run could not write it")
    kinds: dict[str, list[Record]] = {"step": [], "epoch": [], "event": []}
    for line in lines:
        kinds.get(str(line.get("kind")), []).append(line)
    return History(
        path=path,
        settings=settings,
        steps=tuple(kinds["step"]),
        epochs=tuple(kinds["epoch"]),
        events=tuple(kinds["event"]),
        summary=summary,
        environment=environment,
        gaps=tuple(gaps),
        state=_state(path, kinds["event"], summary, environment),
        last_write=max((line["time"] for line in lines), default=None),
    )


def number(record: Mapping[str, Any], name: str) -> float | None:
    """Return a field of a record where it is a finite number, else None."""
    value = record.get(name)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGEST:
        return float(value)
    return None


def whole(value: object) -> int | None:
    """Return `value` where it is a whole number above 0, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _LARGEST else None


def split_of(history: History) -> dict[str, float] | None:
    """Return the mean seconds that rank 0 spent in each phase of a step; None where no step record says."""
    sums, count = dict.fromkeys(PHASES, 0.0), 0
    for record in history.steps:
        split = record.get("split")
        if isinstance(split, dict) and any(number(split, part) is not None for part in PHASES):
            count += 1
            for part in PHASES:
                sums[part] += number(split, part) or 0.0
    return {part: total / count for part, total in sums.items()} if count else None


def speeds(history: History, most: int = _MOST_POINTS) -> Curve:
    """Return images per second (y) over the seconds of training (x), in at most `most` points.

    A speed is measured from one step record to the next of the same epoch: evaluations lie between epochs and do not
    count, waiting for another world does.
    """
    intervals = []
    for before, after in zip(history.steps, history.steps[1:], strict=False):
        samples = (number(after, "samples") or 0.0) - (number(before, "samples") or 0.0)
        seconds = after["elapsed"] - before["elapsed"]
        if before.get("epoch") == after.get("epoch") and samples > 0 and seconds > 0:
            intervals.append((before["elapsed"] + seconds / 2, samples, seconds))
    size = -(-len(intervals) // most) or 1
    groups = [intervals[first : first + size] for first in range(0, len(intervals), size)]
    middles: list[float | None] = [sum(middle for middle, _, _ in group) / len(group) for group in groups]
    return middles, [sum(samples for _, samples, _ in g) / sum(seconds for _, _, seconds in g) for g in groups]


def thinned(x: Sequence[float | None], y: Sequence[float | None], most: int = _MOST_POINTS) -> Curve:
    """Return at most `most` points, each the mean of as many neighbours; a gap where none of them has a value."""
    size = -(-len(x) // most) or 1
    groups = [(x[start : start + size], y[start : start + size]) for start in range(0, len(x), size)]
    return [_mean(group) for group, _ in groups], [_mean(group) for _, group in groups]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _settings(path: Path, gaps: list[str]) -> dict[str, Any]:
    """Return the settings in config.yaml by name, unchecked: a page shows what is there."""
    try:
        values = config_file.parse(plain_file.read_text(path, config_file.MOST_BYTES))
    except OSError as error:
        gaps.append(f"no settings: {path.name} cannot be read ({error.strerror})")
        return {}
    except ValueError:
        values = None
    if not isinstance(values, dict):
        gaps.append(f"no settings: {path.name} is not what a run writes")
        return {}
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat.update(value if isinstance(value, dict) else {str(name): value})
    return flat


def _json(path: Path, gaps: list[str]) -> dict[str, Any]:
    try:
        values = json.loads(plain_file.read_text(path, _MOST_JSON))
    except FileNotFoundError:
        return {}
    except OSError as error:
        gaps.append(f"{path.name} cannot be read ({error.strerror})")
        return {}
    except (ValueError, RecursionError):
        values = None
    if isinstance(values, dict):
        return values
    gaps.append(f"{path.name} cannot be read")
    return {}


def _lines(path: Path, gaps: list[str]) -> list[dict[str, Any]]:
    try:
        texts = plain_file.read_bytes(path).decode(errors="replace").splitlines()
    except OSError as error:
        gaps.append(f"no metrics: {path.name} cannot be read ({error.strerror})")
        return []
    lines, bad = [], []
    for line_number, text in enumerate(texts, 1):
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and number(record, "time") is not None:
            lines.append(record)
        else:
            bad.append(line_number)
    if bad == [len(texts)]:
        gaps.append(f"the last line of {path.name} is torn: the process was ended while it wrote, or is about to go on")
    elif bad:
        gaps.append(f"{len(bad)} lines of {path.name} cannot be read, the first of them line {bad[0]}")
    if not lines:
        gaps.append(f"no metrics: {path.name} is empty")
    return lines


def _with_seconds(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines, each with the seconds of training until then as `elapsed`.

    A run that is resumed writes its notes before the event "start": the pause ends with the first of them.
    """
    begins = set()
    for index, line in enumerate(lines):
        if line.get("kind") == "event" and line.get("name") == "start":
            while index and lines[index - 1].get("name") in ("note", "checkpoint"):
                index -= 1
            begins.add(index)
    seconds, timed = 0.0, []
    for index, line in enumerate(lines):
        if index and index not in begins:
            seconds += max(0.0, line["time"] - lines[index - 1]["time"])
        timed.append({**line, "elapsed": seconds})
    return timed


def _state(path: Path, events: Sequence[Record], summary: Record, environment: Record) -> str:
    last = next((event for event in reversed(events) if event.get("name") in ("start", "end", "world")), {})
    if run_folder.in_use(path) and last.get("name") != "end":
        return "running"
    if last.get("name") == "end":
        return "stopped" if str(last.get("message")).startswith("stopped") else "finished"
    if summary:
        return "finished"
    return "broke off" if environment.get("host") in (None, socket.gethostname()) else "unknown"
