"""What a user sees of a training on the console."""

from __future__ import annotations

import pytest

from hvd_train.run_files import display
from hvd_train.run_files.display import LineDisplay, TerminalDisplay, epoch_line
from hvd_train.run_files.records import EpochRecord, Moment

EVALUATED = EpochRecord(3, 9, 0.5, 0.1, 0.2, 0.25, 0.75, 1.0, 100.0)
PLAIN = EpochRecord(3, 9, 0.5, 0.1, 0.2, None, None, None, 1234.0)
HALFWAY = Moment(epoch=1, cursor=500, step=15, loss=0.5, top1=0.25, images_per_second=10.0)


def test_the_line_of_an_epoch() -> None:
    """The line has the metrics of an epoch; without an evaluation the part about it is missing."""
    assert epoch_line(EVALUATED, 20) == (
        "epoch  3/20  loss 0.5000  top-1  10.00%  val loss 0.2500  val top-1  75.00%       100 images/s"
    )
    assert epoch_line(PLAIN, 5) == "epoch 3/5  loss 0.5000  top-1  10.00%     1,234 images/s"


def test_a_log_has_a_line_for_each_epoch_with_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    """Two epochs of 1,000 samples at 100 images/s take 20 seconds."""
    shown = LineDisplay()
    shown.begin(5, 1000)
    shown.progress(HALFWAY)
    shown.epoch(EVALUATED)
    shown.close()
    (line,) = capsys.readouterr().out.splitlines()
    assert line == f"{epoch_line(EVALUATED, 5)}  0:20 left"


def test_a_long_epoch_has_lines_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Such a line says how much of the epoch is done; before there is a speed, the time left is unknown."""
    monkeypatch.setattr(display, "_LINE_SECONDS", 0.0)
    shown = LineDisplay()
    shown.begin(2, 1000)
    shown.progress(HALFWAY)
    shown.progress(Moment(0, 0, 0, 0.0, 0.0, 0.0))
    first, second = capsys.readouterr().out.splitlines()
    assert first == "epoch 2/2  step 15  50%  loss 0.5000  top-1 25.00%  10 images/s  0:50 left"
    assert second.endswith("  ? left")


def test_messages_stand_above_the_bar_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Square brackets in a message are text, not the markup of the library that draws the bar."""
    shown = TerminalDisplay()
    shown.begin(5, 1000)
    shown.progress(HALFWAY)
    shown.say("a [bold] message")
    shown.epoch(PLAIN)
    shown.close()
    output = capsys.readouterr().out
    assert "a [bold] message" in output
    assert epoch_line(PLAIN, 5) in output


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
