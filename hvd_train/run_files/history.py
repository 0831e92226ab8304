"""A run folder read back: settings, metrics, events and how the run ended. What is missing or damaged is named.

Folders of earlier versions are read as well: no record needs to have every field of today.
"""

from __future__ import annotations

import bisect
import json
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hvd_train import config_file, plain_file, plain_yaml
from hvd_train.errors import UsageError
from hvd_train.progress.clock import PHASES
from hvd_train.progress.figures import Shown
from hvd_train.run_files import run_folder
from hvd_train.run_files.metrics_file import Interval, MetricsFile, Record, number
from hvd_train.run_files.records import Spread, spreads_of
from hvd_train.settings.fields import seconds_in

Curve = tuple[list[float | None], list[float | None]]
"""The x and the y values of a curve, as many of each; None leaves a gap."""
_LARGEST = 1e18  # no run has as many of anything
_MOST_JSON = 2**24  # bytes
_MOST_POINTS = 120  # of a curve: a chart is a few hundred pixels wide


@dataclass(frozen=True)
class History:
    """A run as its files describe it.

    Steps, epochs and events are the records of metrics.jsonl, with the field `elapsed` and no more of each than some
    thousand, as MetricsFile has them.
    """

    path: Path
    settings: Mapping[str, Any]
    """The values of config.yaml by their names, without the groups that they stand in."""
    steps: tuple[Record, ...]
    epochs: tuple[Record, ...]
    events: tuple[Record, ...]
    num_events: int
    """How many there are in the file."""
    figures: tuple[Shown, ...]
    """What the run measures."""
    best: Shown
    """The figure that says which epoch is the best one."""
    intervals: tuple[Interval, ...]
    """The times between the records of steps, from which speeds follow."""
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
    def unit(self) -> str:
        """Return what people call several samples of the run: images, or samples."""
        said = next((e.get("unit") for e in reversed(self.events) if e.get("name") == "start"), None)
        return "samples" if said == "samples" else "images"

    @property
    def total_seconds(self) -> float | None:
        """Return the time of training after which the run ends in any case; None where its settings name none."""
        text = self.settings.get("total_time")
        try:
            return None if text is None else seconds_in("total-time", str(text))
        except UsageError:
            return None

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

    def step_at(self, elapsed: float) -> float | None:
        """Return the step of the last step record until then; None where there is none, or it has no number."""
        index = bisect.bisect_right(self._seconds_of_steps, elapsed)
        return number(self.steps[index - 1], "step") if index else None

    @cached_property
    def _seconds_of_steps(self) -> list[float]:
        return [record["elapsed"] for record in self.steps]

    @cached_property
    def _samples_of_steps(self) -> list[tuple[float, float]]:
        pairs = ((number(record, "step"), number(record, "samples")) for record in self.steps)
        return [(0.0, 0.0), *((step, samples) for step, samples in pairs if step and samples is not None)]


class RunReader:
    """Reads a run folder again and again; of metrics.jsonl only what has been added since the last time."""

    def __init__(self, path: Path) -> None:
        """Prepare to read the folder `path`. Raises UsageError where it is no run folder."""
        if not path.exists():
            raise UsageError(f"{path}: no such run folder")
        if not path.is_dir():
            raise UsageError(f"{path} is a file; name a run folder")
        if not (path / run_folder.CONFIG).exists() and not (path / run_folder.METRICS).exists():
            inside = sorted(entry.parent for entry in path.glob(f"*/{run_folder.CONFIG}"))
            hint = f"; its folders are: name them, as in {path}/*" if inside else ""
            raise UsageError(f"{path} is not a run of hvd_train: it has no {run_folder.CONFIG}{hint}")
        self._path, self._metrics = path, MetricsFile(path / run_folder.METRICS)

    def read(self) -> History:
        """Return the run as its files describe it now; a damaged or missing file is a gap."""
        path, metrics, gaps = self._path, self._metrics, list[str]()
        settings = _settings(path / run_folder.CONFIG, gaps)
        metrics.look()
        gaps += metrics.gaps()
        summary = _json(path / run_folder.SUMMARY, gaps)
        environment = _json(path / run_folder.ENVIRONMENT, gaps)
        if not environment:
            gaps.append(f"no {run_folder.ENVIRONMENT}: the run is of an earlier version, or could not write it")
        events = metrics.events()
        return History(
            path=path,
            settings=settings,
            steps=metrics.steps.values(),
            epochs=metrics.epochs.values(),
            events=events,
            num_events=metrics.num_events,
            figures=metrics.figures,
            best=metrics.best,
            intervals=metrics.intervals.values(),
            summary=summary,
            environment=environment,
            gaps=tuple(gaps),
            state=_state(path, events, summary, environment),
            last_write=metrics.last_write,
        )


def read_run(path: Path | str) -> History:
    """Read a run folder: its settings, steps, epochs, events and summary, as plain values by their names.

    Steps, epochs and events are the records of metrics.jsonl, so that `pandas.DataFrame(read_run(path).epochs)` is a
    table of them; where there are thousands of steps or epochs, a record stands for some neighbours. A damaged or
    missing file is a gap (`gaps`). Raises UsageError where `path` is no run folder.
    """
    return RunReader(Path(path)).read()


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


def spreads_of_ranks(history: History) -> dict[str, Spread]:
    """Return how far the ranks are apart in each phase and in their own work: means over the step records that say so.

    The slowest rank of them is the one that is it most often.
    """
    of_names: dict[str, list[Spread]] = {}
    for record in history.steps:
        for name, spread in spreads_of(record).items():
            of_names.setdefault(name, []).append(spread)
    return {name: _mean_spread(spreads) for name, spreads in of_names.items()}


def _mean_spread(spreads: Sequence[Spread]) -> Spread:
    least, median, most = (
        sum(times) / len(spreads) for times in zip(*((one.least, one.median, one.most) for one in spreads), strict=True)
    )
    return Spread(least, median, most, Counter(one.slowest for one in spreads).most_common(1)[0][0])


def speeds(history: History, most: int = _MOST_POINTS) -> Curve:
    """Return images per second (y) over the seconds of training (x), in at most `most` points.

    A speed is measured from one step record to the next of the same epoch: evaluations lie between epochs and do not
    count, waiting for another world does.
    """
    intervals = history.intervals
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
    """Return the settings in config.yaml, whether or not this version still has them."""
    try:
        values = plain_yaml.parse(plain_file.read_text(path, config_file.MOST_BYTES))
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


def _state(path: Path, events: Sequence[Record], summary: Record, environment: Record) -> str:
    last = next((event for event in reversed(events) if event.get("name") in ("start", "end", "world")), {})
    if run_folder.in_use(path) and last.get("name") != "end":
        return "running"
    if last.get("name") == "end":
        return "stopped" if str(last.get("message")).startswith("stopped") else "finished"
    if summary:
        return "finished" if summary.get("finished") is not False else "stopped"
    return "broke off" if environment.get("host") in (None, socket.gethostname()) else "unknown"
