"""What a run tells: progress on the console, metrics.jsonl and TensorBoard. Rank 0 keeps one; others are silent."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from hvd_train.elastic.members import Change
from hvd_train.run_files import durable
from hvd_train.run_files.ledger import Entry, LedgerFile

_LINE_SECONDS = 10.0  # where there is no terminal: a line this often within a long epoch


@dataclass(frozen=True)
class StepRecord:
    """A training step as it is written down: averages over the global batch, learning rate, speed of all ranks."""

    epoch: int
    step: int
    samples: int
    loss: float
    top1: float
    top5: float
    learning_rate: float
    gradient_norm: float | None
    loss_scale: float | None
    """None where gradients are not scaled."""
    skipped_steps: int
    """Since the run began: steps whose loss or gradient was not finite."""
    images_per_second: float
    split: dict[str, float] | None
    """Seconds of a step by phase (clock.PHASES), on rank 0: the mean since the last line."""


@dataclass(frozen=True)
class EpochRecord:
    """An epoch as it is written down; the val_ fields are None where it was not evaluated."""

    epoch: int
    step: int
    loss: float
    top1: float
    top5: float
    val_loss: float | None
    val_top1: float | None
    val_top5: float | None
    images_per_second: float


@dataclass(frozen=True)
class Moment:
    """Where training is right now, for the display: averages are those of the current epoch so far."""

    epoch: int
    cursor: int
    step: int
    loss: float
    top1: float
    images_per_second: float


class Journal(Protocol):
    """Takes down what happens."""

    def begin(self, epochs: int, samples_per_epoch: int) -> None:
        """Training starts: so many epochs of so many samples."""

    def catch_up(self, recent: Sequence[Entry], last_step: StepRecord | None, last_epoch: EpochRecord | None) -> None:
        """Write down what is not there: another rank that kept the journal, or this one, may not have seen it."""

    def moved(self, moment: Moment) -> None:
        """A step is done: for the display only."""

    def step(self, record: StepRecord) -> None:
        """Metrics of a step, on the cadence of the config."""

    def epoch(self, record: EpochRecord) -> None:
        """Metrics of a finished epoch."""

    def world(self, change: Change, step: int, seconds: float) -> None:
        """The first step in another world is done, so many seconds after the fault or the wish to change."""

    def took(self, entry: Entry) -> None:
        """A line of the ledger, where one is kept."""

    def event(self, name: str, message: str, **facts: Any) -> None:
        """Something happened that the user should know."""

    def close(self) -> None:
        """Nothing more will come."""


class SilentJournal:
    """For ranks other than 0."""

    def begin(self, epochs: int, samples_per_epoch: int) -> None:
        """Nothing."""

    def catch_up(self, recent: Sequence[Entry], last_step: StepRecord | None, last_epoch: EpochRecord | None) -> None:
        """Nothing."""

    def moved(self, moment: Moment) -> None:
        """Nothing."""

    def step(self, record: StepRecord) -> None:
        """Nothing."""

    def epoch(self, record: EpochRecord) -> None:
        """Nothing."""

    def world(self, change: Change, step: int, seconds: float) -> None:
        """Nothing."""

    def took(self, entry: Entry) -> None:
        """Nothing."""

    def event(self, name: str, message: str, **facts: Any) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class RunJournal:
    """Console, metrics.jsonl and TensorBoard of a run folder. A full disk ends none of it but the writing."""

    def __init__(self, folder: Path, resumed_step: int, epochs_done: int, *, live: bool, ledger: bool = False) -> None:
        """`live`: show a bar, not lines. `ledger`: keep one.

        `resumed_step`, `epochs_done`: what an earlier life of this run wrote beyond them did not happen, and is
        taken out.
        """
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and one rank needs it

        self._path = folder / "metrics.jsonl"
        self._last_step, self._last_epoch = _forget_after(self._path, resumed_step, epochs_done)
        self._lines: TextIO | None = open(self._path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  # until close
        purge = resumed_step + 1 if resumed_step else None
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)
        self._display: Display = TerminalDisplay() if live else LineDisplay()
        self._ledger = LedgerFile(folder, resumed_step) if ledger else None

    def begin(self, epochs: int, samples_per_epoch: int) -> None:
        """See Journal."""
        self._display.begin(epochs, samples_per_epoch)

    def catch_up(self, recent: Sequence[Entry], last_step: StepRecord | None, last_epoch: EpochRecord | None) -> None:
        """See Journal."""
        for entry in recent:
            self.took(entry)
        if last_step is not None and last_step.step > self._last_step:
            self.step(last_step)
        if last_epoch is not None and last_epoch.epoch > self._last_epoch:
            self.epoch(last_epoch)

    def moved(self, moment: Moment) -> None:
        """See Journal."""
        self._display.moved(moment)

    def step(self, record: StepRecord) -> None:
        """See Journal."""
        self._last_step = record.step
        self._write("step", vars(record))
        for name, value in vars(record).items():
            if name not in ("epoch", "step", "samples", "split"):
                self._plot(f"train/{name}", value, record.step)
        for phase, seconds in (record.split or {}).items():
            self._plot(f"seconds/{phase}", seconds, record.step)

    def epoch(self, record: EpochRecord) -> None:
        """See Journal."""
        self._last_epoch = record.epoch
        self._in_ledger(LedgerFile.keep)
        self._write("epoch", vars(record))
        for name in ("val_loss", "val_top1", "val_top5"):
            self._plot(name.replace("_", "/"), getattr(record, name), record.step)
        self._display.epoch(record)

    def world(self, change: Change, step: int, seconds: float) -> None:
        """See Journal."""
        self.event(
            "world",
            change.describe(seconds),
            step=step,
            world_size=len(change.after),
            previous_size=len(change.before),
            left=[str(member) for member in change.left],
            came=[str(member) for member in change.came],
            why=change.reason,
            seconds=round(seconds, 3),
            steps_lost=change.steps_lost,
        )
        self._plot("world/size", len(change.after), step)
        self._plot("world/seconds_to_next_step", seconds, step)

    def took(self, entry: Entry) -> None:
        """See Journal."""
        self._in_ledger(lambda ledger: ledger.write(entry))

    def _in_ledger(self, do: Callable[[LedgerFile], None]) -> None:
        try:
            if self._ledger is not None:
                do(self._ledger)
        except OSError as error:
            self._ledger = None
            self._display.say(f"cannot write the ledger: {error.strerror}; training goes on without it")

    def event(self, name: str, message: str, **facts: Any) -> None:
        """See Journal."""
        self._display.say(message)
        self._write("event", {"name": name, "message": message, **facts})

    def close(self) -> None:
        """See Journal."""
        self._display.close()
        self._board.close()
        if self._lines is not None:
            self._lines.close()
        if self._ledger is not None:
            self._ledger.close()

    def _write(self, kind: str, values: Mapping[str, Any]) -> None:
        if self._lines is None:
            return
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        try:
            self._lines.write(json.dumps({"kind": kind, "time": round(time.time(), 3), **finite}) + "\n")
        except OSError as error:
            self._lines = None
            self._display.say(f"cannot write {self._path}: {error.strerror}; training goes on without it")

    def _plot(self, name: str, value: float | None, step: int) -> None:
        if value is not None:
            self._board.add_scalar(name, value, step)


class Display(Protocol):
    """How progress looks."""

    def begin(self, epochs: int, samples_per_epoch: int) -> None:
        """Training starts."""

    def moved(self, moment: Moment) -> None:
        """A step is done."""

    def epoch(self, record: EpochRecord) -> None:
        """An epoch is done."""

    def say(self, message: str) -> None:
        """A line for the user."""

    def close(self) -> None:
        """The end."""


class LineDisplay:
    """Plain lines, for logs and pipes: one per epoch, and one every ten seconds in a long epoch."""

    def __init__(self) -> None:
        self._epochs = self._samples = 0
        self._last = time.monotonic()

    def begin(self, epochs: int, samples_per_epoch: int) -> None:
        """See Display."""
        self._epochs, self._samples = epochs, samples_per_epoch

    def moved(self, moment: Moment) -> None:
        """See Display."""
        if time.monotonic() - self._last >= _LINE_SECONDS:
            left = _left(self._epochs, self._samples, moment.epoch, moment.cursor, moment.images_per_second)
            self.say(
                f"{_place(moment, self._epochs)}  {moment.cursor / self._samples:.0%}  {_facts(moment)}  {left} left"
            )

    def epoch(self, record: EpochRecord) -> None:
        """See Display."""
        left = _left(self._epochs, self._samples, record.epoch, 0, record.images_per_second)
        self.say(f"{epoch_line(record, self._epochs)}  {left} left")

    def say(self, message: str) -> None:
        """See Display."""
        self._last = time.monotonic()
        print(message, flush=True)

    def close(self) -> None:
        """See Display."""


class TerminalDisplay:
    """A live bar, with a line above it for each epoch."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._epochs = self._samples = 0
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
        facts = (TextColumn("{task.fields[facts]}"), TimeRemainingColumn())
        # Under a launcher stdout is a pipe that leads to the terminal.
        self._progress = Progress(*columns, *facts, transient=True, console=Console(force_terminal=True))
        self._task = self._progress.add_task("", total=None, facts="", visible=False)

    def begin(self, epochs: int, samples_per_epoch: int) -> None:
        """See Display."""
        self._epochs, self._samples = epochs, samples_per_epoch
        self._progress.start()
        self._progress.update(self._task, total=epochs * samples_per_epoch, visible=True)

    def moved(self, moment: Moment) -> None:
        """See Display."""
        self._progress.update(
            self._task,
            completed=moment.epoch * self._samples + moment.cursor,
            description=_place(moment, self._epochs),
            facts=_facts(moment),
        )

    def epoch(self, record: EpochRecord) -> None:
        """See Display."""
        self.say(epoch_line(record, self._epochs))

    def say(self, message: str) -> None:
        """See Display."""
        self._progress.console.print(message, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """See Display."""
        self._progress.stop()


def epoch_line(record: EpochRecord, epochs: int) -> str:
    """An epoch in one line."""
    line = f"epoch {record.epoch:>{len(str(epochs))}}/{epochs}  loss {record.loss:.4f}  top-1 {record.top1:7.2%}"
    if record.val_loss is not None:
        line += f"  val loss {record.val_loss:.4f}  val top-1 {record.val_top1:7.2%}"
    return f"{line}  {record.images_per_second:8,.0f} images/s"


def _place(moment: Moment, epochs: int) -> str:
    return f"epoch {moment.epoch + 1}/{epochs}  step {moment.step}"


def _facts(moment: Moment) -> str:
    return f"loss {moment.loss:.4f}  top-1 {moment.top1:.2%}  {moment.images_per_second:,.0f} images/s"


def _left(epochs: int, samples: int, epoch: int, cursor: int, images_per_second: float) -> str:
    if not images_per_second:
        return "?"
    seconds = round(((epochs - epoch) * samples - cursor) / images_per_second)
    hours, rest = divmod(seconds, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def _forget_after(path: Path, step: int, epochs_done: int) -> tuple[int, int]:
    """Keep the lines of metrics.jsonl up to `step`, and no torn last line; the last step and epoch written down.

    An epoch whose last step is done, but which a stop or a crash kept from its end, is written down again.
    """
    if not path.exists():
        return step, epochs_done  # what was before is in another folder
    kept = []
    last = {"step": 0, "epoch": 0}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # torn when the process was killed
        again = record["kind"] == "epoch" and record["epoch"] > epochs_done
        if record.get("step", 0) <= step and not again:
            kept.append(line + "\n")
            if record["kind"] in last:
                last[record["kind"]] = record[record["kind"]]
    durable.write_text(path, "".join(kept))
    return last["step"], last["epoch"]
