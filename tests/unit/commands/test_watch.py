"""`hvd-train watch`: once or until the run ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvd_train import cli
from tests.support.run_folders import event, start, step, whole_run, write


@pytest.mark.parametrize(
    ("terminal", "flags", "once"), [(True, [], False), (True, ["--once"], True), (False, [], True)]
)
def test_without_a_terminal_it_looks_once(
    terminal: bool, flags: list[str], once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log file would fill with views."""
    calls: list[Any] = []

    def watch(run: Path, *, once: bool, interval_s: float) -> None:
        calls.append((run, once, interval_s))

    monkeypatch.setattr("hvd_train.report.watch.watch", watch)
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    assert cli.run(["watch", "run", "--interval", "2.5", *flags]) == 0
    assert calls == [(Path("run"), once, 2.5)]


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "²"])
def test_an_interval_that_cannot_be(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 2."""
    assert cli.run(["watch", "run", "--interval", interval]) == 2
    printed = capsys.readouterr().err
    assert "--interval" in printed
    assert printed.count("\n") == 1


def test_files_of_a_run_cannot_act_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Escapes in messages, settings and the folder's name are replaced."""
    lines = [start(), step(1), event("note", 2, "a\x1b]0;owned\x07b\x9b2J\u202ec")]
    run = write(Path("r\x1bun"), lines)
    config = (run / "config.yaml").read_text().replace("digits-convnet", '"\\e[2Jnet"')
    (run / "config.yaml").write_text(config)
    assert cli.run(["watch", str(run), "--once"]) == 0
    printed = capsys.readouterr().out
    assert "owned" in printed
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(printed)


@pytest.mark.parametrize("value", [None, [], {}, "x", True, -1, 1e300, 10**400])
def test_values_of_any_type_are_shown_or_left_out(value: object, capsys: pytest.CaptureFixture[str]) -> None:
    """`watch` and `report` come to their end whatever stands in the records of a run."""
    lines = whole_run(1)
    names = sorted({name for line in lines for name in line} - {"kind", "time"})
    wrong = [{**line, name: value} for line in lines for name in names if name in line]
    run = write(Path("run"), [*lines, *wrong], summary=True)
    (run / "summary.json").write_text('{"why": ["x"], "images_per_second": "fast", "test_top1": {}}')
    (run / "environment.json").write_text('{"host": [1], "versions": 3, "ranks_of_hosts": [], "command": {}}')
    assert cli.run(["watch", "run", "--once"]) == 0
    assert cli.run(["report", "run", "--no-predictions"]) == 0


def test_without_a_name_the_newest_run_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """And a line says which one."""
    write(Path("runs/mine"), whole_run(), summary=True)
    assert cli.run(["watch", "--once"]) == 0
    told = capsys.readouterr()
    assert "mine" in told.out
    assert told.err == "hvd-train: the newest run: runs/mine\n"
