"""`hvd-train report`: which runs, and with or without predictions."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_train import cli
from hvd_train.plugin import Untrusted
from tests.support.run_folders import whole_run, write


def test_without_a_name_the_newest_run_is_meant(capsys: pytest.CaptureFixture[str]) -> None:
    """A line says which one; where there is none, that a run is to be named."""
    assert cli.run(["report"]) == 2
    assert capsys.readouterr().err == "hvd-train: there is no run in runs/: name a run folder\n"
    write(Path("runs/mine"), whole_run(), summary=True)
    assert cli.run(["report", "--no-predictions"]) == 0
    assert capsys.readouterr() == ("report: report.html\n", "hvd-train: the newest run: runs/mine\n")
    assert "Training report: mine" in Path("report.html").read_text()


def test_a_folder_of_runs_stands_for_them(capsys: pytest.CaptureFixture[str]) -> None:
    """As that of a sweep does; what else is in it is no run, and needs no note."""
    for number in range(2):
        write(Path(f"sweep/{number}"), whole_run(), summary=True)
    Path("sweep/sweep.json").write_text("[]")
    Path("sweep/0.log").write_text("...")
    write(Path("alone"), whole_run(), summary=True)
    assert cli.run(["report", "sweep", "alone", "--no-predictions"]) == 0
    assert capsys.readouterr().err == ""
    assert "Training report: 3 runs" in Path("report.html").read_text()


def test_predictions_that_cannot_be_made_do_not_stop_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    """A run without weights has its curves; the page says why there are no predictions."""
    write(Path("run"), whole_run(), summary=True)
    assert cli.run(["report", "run", "--output", "page.html"]) == 0
    assert capsys.readouterr().out == "report: page.html\n"
    assert "no predictions: " in Path("page.html").read_text()
    assert cli.run(["report", "run", "--output", "page.html", "--no-predictions"]) == 0
    assert "left out: --no-predictions" in Path("page.html").read_text()


def test_what_is_no_run_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """As among `runs/*`; but a name that is not there is a mistake, and so are runs without any."""
    write(Path("runs/one"), whole_run(), summary=True)
    Path("runs/empty").mkdir()
    Path("runs/notes.txt").touch()
    among = ["runs/empty", "runs/notes.txt", "runs/one"]
    assert cli.run(["report", *among, "--no-predictions", "--output", "page.html"]) == 0
    out, err = capsys.readouterr()
    assert out == "report: page.html\n"
    assert err.splitlines() == [
        "hvd-train: left out: runs/empty is not a run of hvd_train: it has no config.yaml",
        "hvd-train: left out: runs/notes.txt is a file; name a run folder",
    ]
    assert cli.run(["report", *among, "runs/gone"]) == 2
    assert "runs/gone: no such run folder" in capsys.readouterr().err
    assert cli.run(["report", *among[:2]]) == 2
    assert "none of these is a run folder" in capsys.readouterr().err
    assert cli.run(["report", "runs/empty"]) == 2
    assert not Path("report.html").exists()


def test_runs_with_code_of_their_own_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However many they are; each has its reason on the page."""

    def refuse(run: Path, device: str, *, trust: bool) -> None:
        raise Untrusted(f"{run} names code; add --trust")

    monkeypatch.setattr("hvd_train.report.predictions.predict", refuse)
    runs = [str(write(Path(f"runs/{number}"), whole_run(), summary=True)) for number in range(3)]
    assert cli.run(["report", *runs]) == 0
    said = "hvd-train: no predictions: runs/0 names code; add --trust (2 more runs do so, too)\n"
    assert capsys.readouterr().err == said
    assert Path("report.html").read_text().count("names code; add --trust") == 3
