"""The terminal view of a run."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hvd_train import cli
from hvd_train.report.watch import seconds_left, sparkline, view
from hvd_train.run_files.history import read_run
from hvd_train.run_files.run_folder import in_use
from tests.support.run_folders import START, event, start, step, whole_run, write


def shown(path: Path, now: float = START + 30) -> str:
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115  # nobody reads it
    console.print(view(read_run(path), now))
    console.file.close()
    return console.export_text()


def test_the_spread_over_ranks() -> None:
    """The slowest rank of the last record and its phases beside those of the others; nothing of one rank."""
    ranks = {"work": [0.01, 0.02, 0.09, 3], "forward": [0.005, 0.006, 0.07, 3], "data": [0.0, 0.0, 0.0, 0]}
    told = shown(write(Path("run"), [start(), step(1, ranks=ranks)]))
    assert "rank 3 is the slowest: 90 ms of own work in a step, the others 20 ms" in told
    assert "forward 70/6" in told
    assert "data" not in told
    assert "slowest" not in shown(write(Path("one"), [start(), step(1)]))


def test_a_finished_run(capsys: pytest.CaptureFixture[str]) -> None:
    """How far it came, its last scores, its speed and its last words; without a terminal once, and exit code 0."""
    write(Path("run"), whole_run(), summary=True)
    assert cli.run(["watch", "run"]) == 0
    told = capsys.readouterr().out
    for words in ("finished", "100%, epoch 3 of 3", "100 images/s", "60.00%", "done: top-1 60.00%", "2 ranks"):
        assert words in told
    assert "left" not in told


def test_a_running_run_says_when_it_will_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its speed of the last lines: 100 samples a second, 2,000 of 3,000 to go."""
    write(Path("run"), [start(), *(step(number) for number in range(1, 11))])
    monkeypatch.setattr("hvd_train.run_files.run_folder.in_use", lambda path: True)
    run = read_run(Path("run"))
    assert seconds_left(run) == pytest.approx(20)
    assert "33%, epoch 1 of 3, step 10" in shown(Path("run"))
    assert "about 20 s left" in shown(Path("run"))
    assert "last heard of 5:00 ago" in shown(Path("run"), START + 310)


@pytest.mark.parametrize(("limit", "left"), [("15", 5), ("1h", 20), ("-", 20), (None, 20)])
def test_a_total_time_ends_a_run_sooner(limit: str | None, left: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps took ten seconds, and the other epochs take twenty; what is no time is none."""
    write(Path("run"), [start(), *(step(number) for number in range(1, 11))])
    monkeypatch.setattr("hvd_train.run_files.run_folder.in_use", lambda path: True)
    run = read_run(Path("run"))
    run = replace(run, settings={**run.settings, "total_time": limit})
    assert seconds_left(run) == pytest.approx(left)


def test_gaps_and_changes_are_shown() -> None:
    """A torn line is named, a loss that is no number is said to be, and a change of the world stands with its time."""
    change = event("world", 2, "world 3 -> 2 at step 2: a rank left")
    write(Path("run"), [start(), step(1), change, step(2, loss=None)], torn="{")
    told = shown(Path("run"))
    for words in ("broke off", "torn", "world 3 -> 2", "the last one is no number", "val loss", "no values"):
        assert words in told


def test_a_run_of_nothing() -> None:
    """An empty folder of a run that was killed at once is shown, too."""
    write(Path("run"), [])
    assert "metrics.jsonl is empty" in shown(Path("run"))


def test_messages_are_not_markup() -> None:
    """Brackets in an event or a path are shown as they are."""
    write(Path("[bold]run"), [start(), event("note", 1, "[red]danger[/red]")])
    assert "[red]danger[/red]" in shown(Path("[bold]run"))
    assert "[bold]run" in shown(Path("[bold]run"))


def test_sparklines() -> None:
    """The lowest value lowest, a blank for a gap, level where all are equal, nothing where there is nothing."""
    assert sparkline([0, 7, None, 3.5]) == "▁█ ▅"
    assert sparkline([2, 2]) == "▁▁"
    assert sparkline([None]) == ""
    assert len(sparkline([float(number) for number in range(1000)], 40)) == 40


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["gone"], "gone: no such run folder"), ([".", "--interval", "0"], "--interval 0")],
)
def test_what_cannot_be_watched(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 2."""
    assert cli.run(["watch", *arguments]) == 2
    assert reason in capsys.readouterr().err


class Terminal:
    """`hvd-train watch run` in a terminal, of a run whose folder this process has locked."""

    def __init__(self, first: str = "") -> None:
        """`first`: what else the program does, before all."""
        self._ours, theirs = pty.openpty()
        code = f"{first}\nimport sys; from hvd_train.cli import run; sys.exit(run(sys.argv[1:]))"
        words = [sys.executable, "-c", code, "watch", "run", "--interval", "0.1"]
        environ = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(Path(cli.__file__).parents[1])}
        self.process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
        os.close(theirs)
        self.output = ""

    def until(self, words: str) -> None:
        end = time.monotonic() + 60
        while words not in self.output:
            ready, _, _ = select.select([self._ours], [], [], max(0.0, end - time.monotonic()))
            assert ready, self.output
            self.output += os.read(self._ours, 1 << 16).decode(errors="replace")

    def ended(self) -> int:
        with contextlib.suppress(OSError):  # Linux's word for the end of a terminal
            while True:
                self.output += os.read(self._ours, 1 << 16).decode(errors="replace")
        os.close(self._ours)
        return self.process.wait(60)


def locked_run() -> Any:
    """A run folder that is being trained in, by this process."""
    import fcntl

    write(Path("run"), [start(time.time() - START), step(1, time.time() - START)])
    lock = open("run/.lock", "w")  # noqa: SIM115  # closed by the test
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert in_use(Path("run"))
    return lock


def test_it_follows_a_run_to_its_end() -> None:
    """What the run writes appears, and its end is the watch's end."""
    with locked_run():
        terminal = Terminal()
        terminal.until("step 1")
        with open("run/metrics.jsonl", "a") as lines:
            lines.write(json.dumps(step(7, time.time() - START)) + "\n")
            lines.flush()
            terminal.until("step 7")
            lines.write(json.dumps(event("end", time.time() - START, "done: at last")) + "\n")
        assert terminal.ended() == 0
    assert "done: at last" in terminal.output
    assert "finished" in terminal.output


DISTURBED = """
import os, signal
from rich.console import Console

flush = Console._write_buffer

def write_buffer(console):
    if any("step 1" in segment.text for segment in console._buffer):
        os.kill(os.getpid(), signal.{number})
        os.kill(os.getpid(), 0)  # where Python looks for signals
    flush(console)

Console._write_buffer = write_buffer
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
@pytest.mark.parametrize("drawing", [False, True])
def test_a_signal_leaves_the_terminal_as_it_was(number: signal.Signals, code: int, drawing: bool) -> None:
    """No traceback, the cursor is back, and the exit code tells of the signal, in the midst of a picture, too."""
    with locked_run():
        terminal = Terminal(DISTURBED.format(number=number.name) if drawing else "")
        terminal.until("step 1")
        if not drawing:
            terminal.process.send_signal(number)
        assert terminal.ended() == code
    assert "Traceback" not in terminal.output
    assert terminal.output.rindex("\x1b[?25h") > terminal.output.rindex("\x1b[?25l")
