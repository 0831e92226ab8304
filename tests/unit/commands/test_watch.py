"""`hvd-train watch`: once or until the run ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvd_train import cli


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
