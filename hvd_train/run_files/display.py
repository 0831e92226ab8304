"""Show the progress of a training: plain lines in logs and pipes, a bar on a terminal."""

import time

from typing_extensions import override

from hvd_train.console import printable
from hvd_train.run_files.records import EpochRecord, Moment

_LINE_SECONDS = 10.0  # a LineDisplay prints a line this often within a long epoch


class LineDisplay:
    """Prints a line for each epoch, and one every ten seconds within."""

    def __init__(self) -> None:
        self._epochs = self._samples = 0
        self._last_line = time.monotonic()

    def begin(self, epochs: int, samples_per_epoch: int) -> None:
        """Start the display of a training."""
        self._epochs, self._samples = epochs, samples_per_epoch

    def progress(self, moment: Moment) -> None:
        """Show progress; called after every step."""
        if time.monotonic() - self._last_line >= _LINE_SECONDS:
            share = f"{moment.cursor / self._samples:.0%}"
            left = _time_left(self._epochs, self._samples, moment.epoch, moment.cursor, moment.images_per_second)
            self.say(f"{_position(moment, self._epochs)}  {share}  {_metrics(moment)}  {left} left")

    def epoch(self, record: EpochRecord) -> None:
        """Show the results of an epoch."""
        left = _time_left(self._epochs, self._samples, record.epoch, 0, record.images_per_second)
        self.say(f"{epoch_line(record, self._epochs)}  {left} left")

    def say(self, message: str) -> None:
        """Print a line for the user."""
        self._last_line = time.monotonic()
        print(printable(message, keep="\n\t"), flush=True)

    def close(self) -> None:
        """Restore the console and end the display."""


class TerminalDisplay(LineDisplay):
    """Shows a live bar below the lines of epochs and messages."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._epochs = self._samples = 0
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
        metrics = (TextColumn("{task.fields[metrics]}"), TimeRemainingColumn())
        # Under a launcher stdout is a pipe to the terminal, which rich would take for a file.
        self._bar = Progress(*columns, *metrics, transient=True, console=Console(force_terminal=True))
        self._task = self._bar.add_task("", total=None, metrics="", visible=False)

    @override
    def begin(self, epochs: int, samples_per_epoch: int) -> None:
        self._epochs, self._samples = epochs, samples_per_epoch
        self._bar.start()
        self._bar.update(self._task, total=epochs * samples_per_epoch, visible=True)

    @override
    def progress(self, moment: Moment) -> None:
        done, position = moment.epoch * self._samples + moment.cursor, _position(moment, self._epochs)
        self._bar.update(self._task, completed=done, description=position, metrics=_metrics(moment))

    @override
    def epoch(self, record: EpochRecord) -> None:
        self.say(epoch_line(record, self._epochs))

    @override
    def say(self, message: str) -> None:
        self._bar.console.print(printable(message, keep="\n\t"), markup=False, highlight=False, soft_wrap=True)

    @override
    def close(self) -> None:
        self._bar.stop()


def epoch_line(record: EpochRecord, epochs: int) -> str:
    """Return the line that shows an epoch out of `epochs`."""
    line = f"epoch {record.epoch:>{len(str(epochs))}}/{epochs}  loss {record.loss:.4f}  top-1 {record.top1:7.2%}"
    if record.val_loss is not None:
        line += f"  val loss {record.val_loss:.4f}  val top-1 {record.val_top1:7.2%}"
    return f"{line}  {record.images_per_second:8,.0f} images/s"


def _position(moment: Moment, epochs: int) -> str:
    return f"epoch {moment.epoch + 1}/{epochs}  step {moment.step}"


def _metrics(moment: Moment) -> str:
    return f"loss {moment.loss:.4f}  top-1 {moment.top1:.2%}  {moment.images_per_second:,.0f} images/s"


def _time_left(epochs: int, samples_per_epoch: int, epoch: int, cursor: int, images_per_second: float) -> str:
    if not images_per_second:
        return "?"
    hours, rest = divmod(round(((epochs - epoch) * samples_per_epoch - cursor) / images_per_second), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
