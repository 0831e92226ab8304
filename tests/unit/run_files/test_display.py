"""What a user sees of a training on the console."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hvd_train.progress.figures import OF_CLASSES
from hvd_train.run_files import display
from hvd_train.run_files.display import LineDisplay, TerminalDisplay, epoch_line
from hvd_train.run_files.records import EpochRecord, Moment, Plan

SHOWN = OF_CLASSES[:2]
OF_5, OF_20 = (Plan(epochs, 1000, SHOWN) for epochs in (5, 20))
TRAINING = {"loss": 0.5, "top1": 0.1, "top5": 0.2}
EVALUATED = EpochRecord(3, 9, {**TRAINING, "val_loss": 0.25, "val_top1": 0.75, "val_top5": 1.0}, 100.0)
PLAIN = EpochRecord(3, 9, {**TRAINING, "val_loss": None, "val_top1": None, "val_top5": None}, 1234.0)
HALFWAY = Moment(1, 500, 15, lambda: {"loss": 0.5, "top1": 0.25, "top5": 1.0}, images_per_second=10.0)


def test_the_line_of_an_epoch() -> None:
    """The line has the metrics of an epoch; without an evaluation the part about it is missing."""
    assert epoch_line(EVALUATED, OF_20) == (
        "epoch  3/20  loss 0.5000  top-1  10.00%  val loss 0.2500  val top-1  75.00%       100 images/s"
    )
    assert epoch_line(replace(EVALUATED, seconds=75.2), OF_20).endswith("  100 images/s  1:15")
    assert epoch_line(PLAIN, OF_5) == "epoch 3/5  loss 0.5000  top-1  10.00%     1,234 images/s"


def test_a_log_has_a_line_for_each_epoch_with_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    """Two epochs of 1,000 samples at 100 images/s take 20 seconds."""
    shown = LineDisplay()
    shown.begin(OF_5)
    shown.progress(HALFWAY)
    shown.epoch(EVALUATED)
    shown.close()
    (line,) = capsys.readouterr().out.splitlines()
    assert line == f"{epoch_line(EVALUATED, OF_5)}  0:20 left"


def test_a_total_time_bounds_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    """The epochs would take 20 s more; with 7.4 s left of its time, a run ends sooner, and with a day it does not."""
    for seconds, told in ((7.4, "0:07 left"), (-1.0, "0:00 left"), (86400.0, "0:20 left")):
        shown = LineDisplay()
        shown.begin(Plan(5, 1000, SHOWN, "images", seconds_left=seconds))
        shown.epoch(EVALUATED)
        assert capsys.readouterr().out.endswith(f"  {told}\n")
    shown = LineDisplay()
    shown.begin(Plan(5, 1000, SHOWN, "images", most_samples=4000))
    shown.epoch(EVALUATED)
    assert capsys.readouterr().out.endswith("  0:10 left\n"), "so many steps end it after four epochs"


def test_each_line_may_begin_with_the_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a message of several lines, too, so that a log can be sorted and searched by it."""
    monkeypatch.setattr("time.strftime", lambda form: form.replace("%Y-%m-%d %H:%M:%S", "2026-11-26 01:33:00"))
    LineDisplay(timestamps=True).say("done\nfiles: runs/a")
    LineDisplay().say("as it is")
    assert capsys.readouterr().out.splitlines() == [
        "2026-11-26 01:33:00  done",
        "2026-11-26 01:33:00  files: runs/a",
        "as it is",
    ]


def test_a_long_epoch_has_lines_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Such a line says how much of the epoch is done; before there is a speed, the time left is unknown."""
    monkeypatch.setattr(display, "_LINE_SECONDS", 0.0)
    shown = LineDisplay()
    shown.begin(Plan(2, 1000, SHOWN, "images"))
    shown.progress(HALFWAY)
    shown.progress(Moment(0, 0, 0, lambda: {"loss": 0.0, "top1": 0.0}, 0.0))
    first, second = capsys.readouterr().out.splitlines()
    assert first == "epoch 2/2  step 15  50%  loss 0.5000  top-1 25.00%  10 images/s  0:50 left"
    assert second.endswith("  ? left")


def test_messages_stand_above_the_bar_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Square brackets in a message are text, not the markup of the library that draws the bar."""
    shown = TerminalDisplay()
    shown.begin(OF_5)
    shown.progress(HALFWAY)
    shown.say("a [bold] message")
    shown.epoch(PLAIN)
    shown.close()
    output = capsys.readouterr().out
    assert "a [bold] message" in output
    assert epoch_line(PLAIN, OF_5) in output


@pytest.mark.parametrize("kind", [LineDisplay, TerminalDisplay])
def test_a_message_does_not_act_on_the_terminal(
    kind: type[LineDisplay | TerminalDisplay], capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of data sets and models, and errors of libraries, are in messages."""
    shown = kind()
    shown.say("a \x1b]0;title\x07 \u202e message")
    shown.close()
    output = capsys.readouterr().out
    assert "a \ufffd]0;title\ufffd \ufffd message" in output
    assert not {"\x07", "\u202e"} & set(output)
