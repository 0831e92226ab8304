"""Report a run to the console, metrics.jsonl, TensorBoard and the ledger."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvd_train.console import show
from hvd_train.plain_file import read_bytes
from hvd_train.progress.clock import Timer, duration
from hvd_train.run_files import history, trackers
from hvd_train.run_files.durable import AppendedFile
from hvd_train.run_files.ledger import Entry, LedgerFile
from hvd_train.run_files.run_folder import METRICS, RunFolder
from hvd_train.run_files.trackers import InThread


@dataclass(frozen=True)
class StepRecord:
    """A training step, a line of metrics.jsonl. Measures are means over the global batch."""

    epoch: int  # counted from 1
    step: int  # in the whole run, counted from 1
    samples: int  # that the run has taken, including this step
    measures: Mapping[str, float]
    learning_rate: float | None  # of the first group of parameters; None if it has none
    gradient_norm: float | None
    loss_scale: float | None  # None if gradients are not scaled
    skipped_steps: int  # in the whole run, because a loss or gradient was not finite
    samples_per_second: float  # of all ranks
    # rank 0's mean seconds in each of clock.PHASES since the last record
    split: dict[str, float] | None
    # rank 0's `device.gpu_load`, every ten seconds
    gpu: Mapping[str, float] = field(default_factory=dict)
    # `Pace.spread`, of the last seconds
    ranks: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EpochRecord:
    """An epoch, a line of metrics.jsonl. Measures are means of its training steps."""

    epoch: int  # counted from 1
    step: int  # its last one
    measures: Mapping[str, float]
    # figures of the validation set, None if it was not evaluated
    scores: Mapping[str, float] | None
    samples_per_second: float
    seconds: float = 0.0  # with the evaluation, without the time between a stop and a resume
    total_seconds: float = 0.0  # of the run so far, by the same clock
    peak_memory_gib: float = 0.0  # rank 0's until now


_SHARES = {"top1": "top-1", "top5": "top-5"}  # measures that are shown in percent


def figure(name: str, value: float) -> str:
    """Write the value of a measure for the user."""
    if name in _SHARES:
        return f"{value:.2%}"
    return f"{value:.2e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"


def labelled(name: str, value: float, width: int = 0) -> str:
    """Write a measure for the user, with its name; one in percent has at least this width."""
    return f"{label(name)} {figure(name, value):>{width if name in _SHARES else 0}}"


def label(name: str) -> str:
    """Return the name of a measure for the user."""
    return _SHARES.get(name, name.replace("_", " "))


TAKEN = {"train", "seconds", "gpu", "ranks", "world"}
"""The first parts of names at trackers, which scores cannot have."""
_LINE_SECONDS = 10.0  # progress within an epoch is shown this often


class Journal:
    """Writes the files of a run folder and shows progress. Without a folder it does neither.

    It prints a line for each epoch, and lines of progress within.
    """

    def __init__(
        self,
        folder: RunFolder | None = None,
        resumed_step: int = 0,
        epochs_done: int = 0,
        *,
        ledger: bool = False,
        log_to: Sequence[str] = ("tensorboard",),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the files of `folder`, without entries after `resumed_step` and `epochs_done`.

        `ledger` keeps a ledger. `log_to` are names of trackers, which get the `settings` of the
        run. Raises OSError if the files cannot be read.
        """
        self._silence = Timer(_LINE_SECONDS, time.monotonic)
        self._epochs = 0
        self._samples = 0
        self._max_seconds = math.inf
        self._sample = "sample"
        self._shown = ["loss"]
        self._lines: AppendedFile | None = None
        self._trackers = list[InThread]()
        self._ledger: LedgerFile | None = None
        self._last_step = self._last_epoch = self.steps_lost = 0
        self._resumed_step = resumed_step
        # figures that an earlier process has written after the resumed step
        self._evaluated = set[str]()
        if folder is not None:
            kept = _forget_after(folder, resumed_step, epochs_done)
            self._last_step, self._last_epoch, reached, self._evaluated = kept
            self.steps_lost = max(0, reached - resumed_step)  # at least: not every step has a line
            self._lines = folder.append(METRICS, self._say)
            self._trackers = trackers.opened(
                log_to, folder, resumed_step, settings or {}, self._say
            )
            self._ledger = LedgerFile(folder, epochs_done, self._say) if ledger else None

    def begin(
        self,
        epochs: int,
        samples_per_epoch: int,
        sample: str,
        best: str,
        max_seconds: float | None = None,
    ) -> None:
        """Start the display of a training; `sample` is the name of a sample,
        `best` the task's best figure.
        """
        self._epochs = epochs
        self._samples = samples_per_epoch
        self._max_seconds = max_seconds or math.inf
        self._sample = sample
        self._shown = list(dict.fromkeys(["loss", best])) if best else []

    def catch_up(
        self, recent: Sequence[Entry], last_step: StepRecord | None, last_epoch: EpochRecord | None
    ) -> None:
        """Write records that the files lack after the writing rank was lost."""
        for entry in recent:
            self.took(entry)
        if last_step is not None and last_step.step > self._last_step:
            self.step(last_step)
        if last_epoch is not None and last_epoch.epoch > self._last_epoch:
            self.epoch(last_epoch)

    @property
    def line_is_due(self) -> bool:
        """Whether the progress within an epoch is to be shown."""
        return self._silence.due

    def progress(self, so_far: EpochRecord, cursor: int) -> None:
        """Show an epoch of which `cursor` samples are taken."""
        where = (
            f"epoch {so_far.epoch}/{self._epochs}  step {so_far.step}  {cursor / self._samples:.0%}"
        )
        speed = f"{so_far.samples_per_second:,.0f} {self._sample}s/s"
        left = self._time_left(so_far, so_far.epoch - 1, cursor)
        figures = self._figures(so_far.measures)
        self._say(f"{time.strftime('%H:%M:%S')}  {where}  {figures}  {speed}  {left} left")

    def step(self, record: StepRecord) -> None:
        """Write the metrics of a step."""
        self._last_step = record.step
        values = _flat(vars(record))
        self._write("step", values)
        groups = {
            "train": {name: value for name, value in values.items() if name not in _NOT_PLOTTED},
            "seconds": record.split or {},
            "gpu": record.gpu,
            "ranks": record.ranks,
        }
        plotted = {
            f"{group}/{name}": value
            for group, of_group in groups.items()
            for name, value in of_group.items()
        }
        self._plot(plotted, record.step)

    def epoch(self, record: EpochRecord) -> None:
        """Show an epoch, and write its metrics unless an earlier process has."""
        if self._ledger is not None:
            self._ledger.sync(record.epoch)
        if record.epoch > self._last_epoch:
            self._last_epoch = record.epoch
            self._write("epoch", _flat(vars(record)))
            self._plot({"seconds/epoch": record.seconds}, record.step)
        line = (
            f"epoch {record.epoch:>{len(str(self._epochs))}}/{self._epochs}  "
            f"{self._figures(record.measures)}"
        )
        if record.scores is not None:
            line += f"  {self._figures(record.scores, 'val ')}"
        left = self._time_left(record, record.epoch, 0)
        speed = f"{record.samples_per_second:7,.0f} {self._sample}s/s"
        took = duration(round(record.seconds, 2))
        self._say(f"{line}  {speed}  {took}, {left} left")

    def evaluation(
        self, name: str, figures: Mapping[str, float], step: int, *, shown: bool = True
    ) -> None:
        """Write the scores of a set after `step` steps, and show them,
        unless an earlier process has.
        """
        values = {f"{name}_{figure}": value for figure, value in figures.items()}
        if not values or (step == self._resumed_step and values.keys() <= self._evaluated):
            return
        text = "  ".join(f"{name} {labelled(figure, value)}" for figure, value in figures.items())
        if shown:
            self._say(text)
        self._write("event", {"name": "evaluation", "message": text, "step": step, **values})
        self._plot({f"{name}/{figure}": value for figure, value in figures.items()}, step)

    def world(self, message: str, facts: Mapping[str, Any]) -> None:
        """Report a change of world, which cost `seconds` until its first step."""
        self.event("world", message, **facts)
        sizes = {"world/size": facts["world_size"], "world/seconds_to_next_step": facts["seconds"]}
        self._plot(sizes, facts["step"])

    def took(self, entry: Entry) -> None:
        """Write a new or extended entry of the ledger, if there is one."""
        if self._ledger is not None:
            self._ledger.took(entry)

    def event(self, name: str, message: str, **facts: Any) -> None:
        """Show a message to the user, and write it with facts; `name` is its kind."""
        self._say(message)
        self._write("event", {"name": name, "message": message, **facts})

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write values of the user's own after `step` steps."""
        self._write("event", {"name": "log", "step": step, **values})
        self._plot(values, step)

    def complete(self) -> bool:
        """Complete the ledger, if there is one; return whether it fits on the disk."""
        return self._ledger is None or self._ledger.complete()

    def close(self) -> None:
        """Complete the ledger and close the files."""
        for file in (*self._trackers, self._lines, self._ledger):
            if file is not None:
                file.close()

    def _time_left(self, now: EpochRecord, epochs_done: int, cursor: int) -> str:
        if not now.samples_per_second:
            return "?"
        seconds = ((self._epochs - epochs_done) * self._samples - cursor) / now.samples_per_second
        return duration(round(max(0.0, min(seconds, self._max_seconds - now.total_seconds))))

    def _figures(self, values: Mapping[str, float], prefix: str = "") -> str:
        shown = self._shown or list(values)[:3]
        return "  ".join(
            prefix + labelled(name, values[name], 7) for name in shown if name in values
        )

    def _say(self, message: str) -> None:
        self._silence.reset()
        if self._lines is not None:
            show(message)

    def _write(self, kind: str, values: Mapping[str, Any]) -> None:
        if self._lines is None:
            return
        # JSON has no NaN and no infinity; json.dumps would write invalid JSON for them.
        finite = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in values.items()
        }
        self._lines.write(
            (json.dumps({"kind": kind, "time": round(time.time(), 3), **finite}) + "\n").encode()
        )

    def _plot(self, values: Mapping[str, float | None], step: int) -> None:
        known = {name: value for name, value in values.items() if value is not None}
        for tracker in self._trackers if known else ():
            tracker.add(known, step)


_NOT_PLOTTED = "epoch", "step", "samples", "split", "gpu", "ranks"


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a record with its measures and scores by their
    names, as its line has them.
    """
    scores = {f"val_{name}": value for name, value in (values.get("scores") or {}).items()}
    rest = {name: value for name, value in values.items() if name not in ("measures", "scores")}
    return {**rest, **values["measures"], **scores}


def _forget_after(folder: RunFolder, step: int, epochs_done: int) -> tuple[int, int, int, set[str]]:
    """Remove torn lines and lines after `step` from metrics.jsonl.

    Return the last step and epoch that are left, the last step before, and the names of scores
    after `step` steps. Raises OSError.
    """
    path = folder.path / METRICS
    evaluated = set[str]()
    if not path.exists():
        return step, epochs_done, step, evaluated  # the run resumes in another folder
    last_step = last_epoch = reached = 0
    kept = []
    for line, record in history.lines(path):
        kind = record.get("kind")
        number = history.whole(record.get("step")) or 0
        reached = max(reached, number)
        if number <= step:
            kept.append(line.rstrip(b"\n") + b"\n")
            if number == step and record.get("name") == "evaluation":
                evaluated |= record.keys()
            if kind == "step":
                last_step = number
            if kind in ("step", "epoch"):  # an epoch's record comes before the next epoch's steps
                epoch = history.whole(record.get("epoch")) or 0
                last_epoch = max(last_epoch, epoch - (kind == "step"))
    if b"".join(kept) != read_bytes(path):
        with folder.writing(METRICS) as whole:
            whole.writelines(kept)
    return last_step, last_epoch, reached, evaluated
