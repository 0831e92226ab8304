"""`hvd-train watch`: the terminal view of a run."""

import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from hvd_train import cli
from hvd_train.report.watch import view, watch
from hvd_train.run_files.history import read
from tests.support.run_folders import START, event, start, step, whole_run, write


def shown(path: Path, now: float = START + 30) -> str:
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(view(read(path), now))
    console.file.close()
    return console.export_text()


def test_a_finished_run_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal the view is printed once."""
    write(Path("run"), whole_run(), summary=True)
    assert cli.run(["watch", "run"]) == 0
    output = capsys.readouterr().out
    for words in ("3 of 3", "images/s", "60.00% (epoch 1)", "done: top-1 60.00%", "digits-convnet"):
        assert words in output
    assert "left" not in output


def test_the_view_estimates_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 100 samples/s, 2,000 are left."""
    write(Path("run"), [start(), *(step(number) for number in range(1, 11))])
    monkeypatch.setattr("hvd_train.run_files.run_folder.in_use", lambda path: True)
    assert "1 of 3" in shown(Path("run"))
    assert "about 20 s left" in shown(Path("run"))
    assert "last record 5:00 ago" in shown(Path("run"), START + 310)


def test_gaps_and_changes_are_shown() -> None:
    """Brackets are no markup."""
    name = "[bold]run"
    events = [event("world", 2, "world 3 -> 2 at step 2"), event("note", 2, "[red]danger[/red]")]
    write(Path(name), [start(), step(1), *events, step(2, loss=None)], torn="{")
    output = shown(Path(name))
    expected = (name, "broke off", "world 3 -> 2", "[red]danger[/red]", "not the last one")
    for words in (*expected, "val loss", "no values"):
        assert words in output


def test_the_view_follows_a_run_to_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(Path("run"), [start(), step(1)])
    monkeypatch.setattr("hvd_train.run_files.run_folder.in_use", lambda path: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    written = iter([step(7), event("end", 8, "done: at last")])

    def train(_seconds: float) -> None:
        with open("run/metrics.jsonl", "a") as lines:
            lines.write(json.dumps(next(written)) + "\n")

    monkeypatch.setattr("time.sleep", train)
    watch(Path("run"), once=False, interval_s=1.0)
    output = capsys.readouterr().out
    for words in ("0.1 of 3", "0.7 of 3", "done: at last", "finished"):
        assert words in output
