"""`hvd-train report`: which runs, and with or without predictions."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_train import cli
from tests.support.run_folders import whole_run, write


def test_no_runs_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """With an example of what to type."""
    assert cli.run(["report"]) == 2
    assert "name at least one run folder, as in hvd-train report runs/*" in capsys.readouterr().err


def test_predictions_that_cannot_be_made_do_not_stop_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    """A run without weights has its curves; the page says why there are no predictions."""
    write(Path("run"), whole_run(), summary=True)
    assert cli.run(["report", "run", "--output", "page.html"]) == 0
    assert capsys.readouterr().out == "report: page.html\n"
    assert "no predictions: " in Path("page.html").read_text()
    assert cli.run(["report", "run", "--output", "page.html", "--no-predictions"]) == 0
    assert "left out: --no-predictions" in Path("page.html").read_text()
