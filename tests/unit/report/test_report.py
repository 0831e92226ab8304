"""The report page as a whole: what stands in it, and that no run is too broken for one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hvd_train import cli
from hvd_train.report import report
from hvd_train.run_files.history import read_run
from tests.support.pages import composed, section
from tests.support.run_folders import elastic_run, epoch, event, start, step, whole_run, write

BROKEN: dict[str, Callable[[Path], Path]] = {
    "one epoch": lambda path: write(path, whole_run(1), summary=True, epochs=1),
    "no validation": lambda path: write(
        path, [start(), step(1), step(2), epoch(1, val_loss=None, val_top1=None, val_top5=None)]
    ),
    "interrupted": lambda path: write(path, [start(), step(1), step(2)]),
    "before the first step": lambda path: write(path, [start()]),
    "NaN": lambda path: write(
        path,
        [
            *(start(), step(1), step(2, loss=None, gradient_norm=None, skipped_steps=1)),
            event("skipped", 2, "step 2 is skipped: its loss is not finite", step=2),
            *(step(3), epoch(1, val_loss=None)),
        ],
    ),
    "torn": lambda path: write(path, [start(), step(1), step(2)], torn='{"kind": "st'),
    "empty": lambda path: write(path, []),
    "elastic": lambda path: write(path, elastic_run()),
    "nonsense": lambda path: write(
        path, [start(num_samples="x"), step(1, loss="x", samples=None, epoch="?"), epoch(1, epoch=None)]
    ),
    "only epochs": lambda path: write(path, [start(), epoch(1), epoch(2), epoch(3)]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_no_run_is_too_broken(name: str) -> None:
    """Every section is there; what is missing is named where it would have been."""
    path = BROKEN[name](Path("a run"))
    text = composed(path)
    for heading in ("Summary", "Learning curves", "Throughput", "Predictions", "Configuration", "Environment"):
        assert section(text, heading).strip()
    said = {
        "one epoch": "1 of 1",
        "no validation": "no validation",
        "interrupted": "broke off (killed or failed)",
        "before the first step": "no values",
        "NaN": "not finite",
        "torn": "last line of metrics.jsonl is torn",
        "empty": "metrics.jsonl is empty",
        "elastic": "3→2",
        "nonsense": "no values",
        "only epochs": "no time split",
    }
    assert said[name] in text


def test_all_of_them_together() -> None:
    """Twenty runs, ten of them broken, in one page in which every one has its name."""
    paths = [make(Path(f"runs/{name}")) for name, make in BROKEN.items()]
    paths += [write(Path(f"runs/good-{number}"), whole_run(), seed=number) for number in range(10)]
    text = composed(*paths)
    for path in paths:
        assert path.name in section(text, "Summary")
    assert section(text, "Configuration").count("<td>9</td>") == 1


def test_names_of_runs() -> None:
    """Short where they begin alike, and never the same for two of them."""
    paths = [write(Path(name), []) for name in ("a/digits-20260101", "a/digits-20260202", "b/digits-20260101")]
    runs = [read_run(path) for path in paths]
    assert report.labels(runs[:1]) == ["digits-20260101"]
    assert report.labels(runs[:2]) == ["…20260101", "…20260202"]
    assert len(set(report.labels(runs))) == 3
    assert report.labels([runs[0], runs[0]]) == ["1 a/digits-20260101", "2 a/digits-20260101"]


def test_many_runs_are_named_by_their_settings_best_first() -> None:
    """Folders of a sweep say little; what all runs share is said once, and each run has one row in each table."""
    for number in range(9):
        rate, model = (0.1, 0.05, 0.01)[number % 3], ("resnet18", "resnet34", "resnet50")[number // 3]
        lines = [start(), step(1), epoch(1, val_top1=number / 10)]
        write(Path(f"sweep/{number:03}"), lines, learning_rate=rate, model=model, log_steps=number + 1)
    text = composed(*(Path(f"sweep/{number:03}") for number in range(9)))
    summary, configuration = section(text, "Summary"), section(text, "Configuration")
    names = [name.partition("  ")[2] for name in re.findall(r'<th scope="row">(.*?)</th>', summary)]
    assert names[:4] == ["resnet50, lr 0.01", "resnet50, lr 0.05", "resnet50, lr 0.1", "resnet34, lr 0.01"]
    assert "All runs: state broke off" in summary
    assert "008</td>" in summary
    differing = configuration.partition("What all runs share")[0]
    assert len(re.findall(r'<th scope="row">', differing)) == 9
    of_sweep = report.ordered([read_run(Path("sweep/001")), read_run(Path("sweep/008"))])
    assert [run.name for run in of_sweep] == ["001", "008"]


def test_many_runs_that_differ_in_nothing_have_the_names_of_their_folders() -> None:
    """Or of their settings and a number, where these are not enough."""
    same = [read_run(write(Path(f"runs/run-{number}"), whole_run(1))) for number in range(9)]
    assert report.by_settings(same) == report.labels(same)
    pairs = [read_run(write(Path(f"pairs/{number}"), whole_run(1), seed=number // 2)) for number in range(4)]
    assert report.by_settings(pairs) == ["1 seed 0", "2 seed 0", "3 seed 1", "4 seed 1"]


def test_what_a_run_says_is_not_taken_for_html() -> None:
    """A message or a name with angle brackets is shown, not run."""
    lines = [start(), event("note", 1, "<script>alert(1)</script>")]
    text = composed(write(Path("<b>bold"), lines, model="my:<i>net"))
    assert "<script" not in text
    assert "<b>" not in text
    assert "<i>" not in text


def test_only_reports_are_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    """A second report takes the place of the first; a run's own file, or anything else, is left alone."""
    write(Path("run"), whole_run())
    line = ["report", "run", "--no-predictions", "--output"]
    assert cli.run([*line, "page.html"]) == 0
    assert cli.run([*line, "page.html"]) == 0
    before = Path("run/config.yaml").read_text()
    Path("mine.html").write_text("<p>mine")
    Path("folder").mkdir()
    for output, reason in (
        ("run/config.yaml", "not a report of ours"),
        ("mine.html", "not a report of ours"),
        ("folder", "is a folder"),
        ("nowhere/page.html", "no folder nowhere"),
    ):
        capsys.readouterr()
        assert cli.run([*line, output]) == 2
        told = capsys.readouterr().err
        assert reason in told
        assert told.count("\n") == 1
    assert Path("run/config.yaml").read_text() == before
    assert Path("mine.html").read_text() == "<p>mine"


@pytest.mark.timeout(60)
def test_a_pipe_is_no_report_to_be_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    """It is not waited for: one line, exit code 2."""
    write(Path("run"), whole_run())
    os.mkfifo("report.html")
    assert cli.run(["report", "run", "--no-predictions"]) == 2
    assert capsys.readouterr().err == "hvd-train: --output report.html: it is no file, but a pipe or a device\n"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nothing"], "nothing: no such run folder"),
        (["bad"], "bad/scaling.json is not a record of hvd-train bench scaling"),
    ],
)
def test_what_cannot_be_reported(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 2, and no file."""
    Path("bad").mkdir()
    Path("bad/scaling.json").write_text('{"rows": 3}')
    assert cli.run(["report", *arguments]) == 2
    assert reason in capsys.readouterr().err
    assert not Path("report.html").exists()
