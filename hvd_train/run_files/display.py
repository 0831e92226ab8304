"""How the progress of a training looks on the console: plain lines in logs and pipes, a bar on a terminal."""

from __future__ import annotations

import time
from typing import Protocol

from typing_extensions import override

from hvd_train.console import printable
from hvd_train.progress.clock import duration
from hvd_train.run_files.records import EpochRecord, Moment, Plan

_LINE_SECONDS = 10.0  # a LineDisplay prints a line this often within a long epoch


class Display(Protocol):
    """Shows progress and messages to the user."""

    def begin(self, plan: Plan) -> None:
        """Training starts, or goes on, and is to do this."""

    def progress(self, moment: Moment) -> None:
        """Show how far training is; called after every step."""

    def epoch(self, record: EpochRecord) -> None:
        """Show the results of an epoch that has just ended."""

    def say(self, message: str) -> None:
        """Print a line for the user."""

    def close(self) -> None:
        """Leave the console as it was; nothing is shown after this."""


class LineDisplay(Display):
    """Prints plain lines to standard output: one for each epoch, and one every ten seconds within a long epoch."""

    def __init__(self, *, timestamps: bool = False) -> None:
        """Begin each line with the date and the local time where `timestamps` says so."""
        self._plan = Plan()
        self._ends_at: float | None = None
        self._last_line = time.monotonic()
        self._time = "%Y-%m-%d %H:%M:%S  " if timestamps else ""

    @override
    def begin(self, plan: Plan) -> None:
        self._plan = plan
        self._ends_at = None if plan.seconds_left is None else time.monotonic() + plan.seconds_left

    @override
    def progress(self, moment: Moment) -> None:
        if time.monotonic() - self._last_line >= _LINE_SECONDS:
            share = f"{moment.cursor / self._plan.samples_per_epoch:.0%}"
            left = self._time_left(moment.epoch, moment.cursor, moment.images_per_second)
            self.say(f"{_position(moment, self._plan)}  {share}  {_metrics(moment, self._plan)}  {left} left")

    @override
    def epoch(self, record: EpochRecord) -> None:
        left = self._time_left(record.epoch, 0, record.images_per_second)
        self.say(f"{epoch_line(record, self._plan)}  {left} left")

    @override
    def say(self, message: str) -> None:
        self._last_line = time.monotonic()
        stamp = time.strftime(self._time)
        print("\n".join(stamp + line for line in printable(message, keep="\n\t").split("\n")), flush=True)

    @override
    def close(self) -> None:
        pass

    def _time_left(self, epoch: int, cursor: int, images_per_second: float) -> str:
        if not images_per_second:
            return "?"
        seconds = max(0, self._plan.samples - epoch * self._plan.samples_per_epoch - cursor) / images_per_second
        if self._ends_at is not None:
            seconds = min(seconds, max(0.0, self._ends_at - time.monotonic()))
        hours, rest = divmod(round(seconds), 3600)
        return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


class TerminalDisplay(Display):
    """Shows a live bar at the bottom of the terminal, and above it a line for each epoch and each message."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._plan = Plan()
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
        metrics = (TextColumn("{task.fields[metrics]}", markup=False), TimeRemainingColumn())
        # Under a launcher stdout is a pipe that leads to the terminal: rich would take it for a file.
        self._bar = Progress(*columns, *metrics, transient=True, console=Console(force_terminal=True))
        self._task = self._bar.add_task("", total=None, metrics="", visible=False)

    @override
    def begin(self, plan: Plan) -> None:
        self._plan = plan
        self._bar.start()
        self._bar.update(self._task, total=plan.samples, visible=True)

    @override
    def progress(self, moment: Moment) -> None:
        self._bar.update(
            self._task,
            completed=moment.epoch * self._plan.samples_per_epoch + moment.cursor,
            description=_position(moment, self._plan),
            metrics=_metrics(moment, self._plan),
        )

    @override
    def epoch(self, record: EpochRecord) -> None:
        self.say(epoch_line(record, self._plan))

    @override
    def say(self, message: str) -> None:
        self._bar.console.print(printable(message, keep="\n\t"), markup=False, highlight=False, soft_wrap=True)

    @override
    def close(self) -> None:
        self._bar.stop()


def epoch_line(record: EpochRecord, plan: Plan) -> str:
    """Return the line about an epoch, with the figures that the plan shows."""
    line = f"epoch {record.epoch:>{len(str(plan.epochs))}}/{plan.epochs}"
    for key, before in (("", ""), ("val_", "val ")):
        for figure in plan.shown:
            value = record.scores.get(f"{key}{figure.name}")
            if value is not None:
                width = 7 if figure.form.endswith("%") else 0  # 9% takes the room of 100%, so that lines are even
                line += f"  {before}{figure.title} {figure.written(value).rjust(width)}"
    line += f"  {record.images_per_second:8,.0f} {plan.unit}/s"
    return line if record.seconds is None else f"{line}  {duration(record.seconds)}"


def _position(moment: Moment, plan: Plan) -> str:
    return f"epoch {moment.epoch + 1}/{plan.epochs}  step {moment.step}"


def _metrics(moment: Moment, plan: Plan) -> str:
    scores = moment.scores()
    known = [figure for figure in plan.shown if figure.name in scores]
    figures = [f"{figure.title} {figure.written(scores[figure.name])}" for figure in known]
    return "  ".join([*figures, f"{moment.images_per_second:,.0f} {plan.unit}/s"])
