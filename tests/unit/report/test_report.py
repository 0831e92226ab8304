"""The report page: what stands in it, and that no run is too broken for one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from hvd_train import cli
from hvd_train.report import curves, report
from hvd_train.report.report import Missed, Predictions, compose
from hvd_train.run_files.history import read
from tests.support.run_folders import epoch, event, start, step, whole_run, write

NOW = datetime(2026, 1, 2, 3, 4)


def composed(*paths: Path) -> str:
    runs, scalings = report.open_all(paths)
    return compose(runs, scalings, {}, NOW)


def section(text: str, heading: str) -> str:
    """One section of a page."""
    found = re.search(rf"<section[^>]*>\s*<h2>{heading}</h2>(.*?)</section>", text, re.DOTALL)
    assert found is not None, heading
    return found.group(1)


def worlds() -> list[dict[str, Any]]:
    """An elastic run: a rank is lost, the same ranks recover, the run is stopped and goes on."""
    facts = {"why": "a rank was lost", "seconds": 3.5, "steps_lost": 0}
    return [
        *(start(), step(1), step(2), step(3)),
        event("world", 7, step=4, previous_size=3, world_size=2, **facts),
        *(step(4, 7.1), step(5, 8)),
        event("world", 9, step=6, previous_size=2, world_size=2, **facts),
        *(step(number, 3.1 + number) for number in range(6, 11)),
        event("end", 13.5, "stopped by SIGINT at step 10, committed"),
        *(start(500), step(11, 501), step(12, 502)),
    ]


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
    "elastic": lambda path: write(path, worlds()),
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


def test_worlds_and_recoveries_are_marked() -> None:
    """In the curves, in the throughput, and in a table with what each change has cost."""
    text = composed(write(Path("run"), worlds()))
    for part in ("Learning curves", "Throughput"):
        for label in ("3→2", "recovered", "resumed"):
            assert label in section(text, part)
    assert "a rank was lost" in section(text, "Throughput")
    assert "<td>3.5</td>" in section(text, "Throughput")


def test_differences_among_runs() -> None:
    """What differs has a column for each run; what does not is said once; the folder of each is no difference."""
    one = write(Path("runs/digits-1"), whole_run(), learning_rate=0.1)
    other = write(Path("runs/digits-2"), whole_run(), learning_rate=0.025)
    part = section(composed(one, other), "Configuration")
    differs, _, same = part.partition("What all have")
    assert re.findall(r'<th scope="row">(.*?)</th>', differs) == ["learning_rate"]
    assert "<td>0.1</td><td>0.025</td>" in differs
    assert "global_batch_size" in same


def test_names_of_runs() -> None:
    """Short where they begin alike, and never the same for two of them."""
    paths = [write(Path(name), []) for name in ("a/digits-20260101", "a/digits-20260202", "b/digits-20260101")]
    runs = [read(path) for path in paths]
    assert report.labels(runs[:1]) == ["digits-20260101"]
    assert report.labels(runs[:2]) == ["…20260101", "…20260202"]
    assert len(set(report.labels(runs))) == 3
    assert report.labels([runs[0], runs[0]]) == ["1 a/digits-20260101", "2 a/digits-20260101"]


def test_what_a_run_says_is_not_taken_for_html() -> None:
    """A message or a name with angle brackets is shown, not run."""
    lines = [start(), event("note", 1, "<script>alert(1)</script>")]
    text = composed(write(Path("<b>bold"), lines, model="my:<i>net"))
    assert "<script" not in text
    assert "<b>" not in text
    assert "<i>" not in text


def test_the_time_split() -> None:
    """Milliseconds and shares of each part; a run without one is a gap beside one that has it."""
    parts = ("data", "forward", "backward", "reduction", "optimizer", "other")
    split = dict(zip(parts, (0.01, 0.02, 0.04, 0.02, 0.005, 0.005), strict=True))
    new = write(Path("new"), [start(), step(1, split=split)])
    part = section(composed(new, write(Path("old"), whole_run())), "Where the time goes")
    assert "100.00 ms" in part
    assert "40.00 ms · 40%" in part
    assert "old: no time split" in part


def test_one_run_that_diverges_leaves_the_others_readable() -> None:
    """The axis of the loss ends where the usual values are, and says so; that of the rate reaches both."""
    good = write(Path("good"), whole_run())
    bad = write(Path("bad"), [start(), step(1, learning_rate=1e6), step(2, loss=1e16), step(3, loss=1e18)])
    charts = curves.learning([read(good), read(bad)], ["good", "bad"], "epochs")
    loss, rate = charts[0], charts[-1]
    assert loss.y.end is not None
    assert loss.y.end < 100
    assert loss.y.label == f"cross entropy, logarithmic, cut at {loss.y.end:g}"
    assert rate.y.log
    assert rate.series[0].y[0] == 0.1
    assert curves.learning([read(good)], ["good"], "epochs")[0].y.end is None


def scaling(folder: Path) -> Path:
    folder.mkdir()
    row = {"learning_rate": 0.1, "global_batch_size": 64, "steps_per_epoch": 23, "epoch_seconds": 1.5, "val_loss": 0.04}
    rows = [
        {**row, "workers": 2, "images_per_second": 1500.0, "efficiency": 0.75, "test_loss": None, "top1": 0.98},
        {**row, "workers": 1, "images_per_second": 1000.0, "efficiency": 1.0, "test_loss": 0.05, "top1": 0.99},
    ]
    (folder / "scaling.json").write_text(json.dumps({"mode": "strong", "rows": rows}))
    return folder


def test_a_measured_scaling() -> None:
    """Its table in the order of the workers, with a gap for what was not measured, and its plots; alone or beside."""
    path = scaling(Path("bench"))
    for text in (composed(path), composed(write(Path("run"), whole_run()), path)):
        part = section(text, "Scaling")
        assert "strong scaling" in part
        assert re.findall(r'<th scope="row">(\d)</th>', part) == ["1", "2"]
        assert '<td class="n">75.0%</td>' in part
        assert '<td class="n">—</td>' in part
        assert part.count("<svg") == 2
    assert "No measured scaling" in composed(write(Path("other"), whole_run()))


def predictions(classes: int = 3) -> Predictions:
    counts = {(row, column): 9 if row == column else row for row in range(classes) for column in range(classes)}
    missed = Missed(b"\x89PNG", "one", "two", 0.75, 2.5, 17)
    return Predictions(tuple(f"class {n}" for n in range(classes)), counts, (missed,))


def test_predictions_and_their_absence() -> None:
    """The matrix, or for many classes the pairs confused most; the worst images; or why there are none."""
    path = write(Path("run"), whole_run())
    few, many = (
        section(compose([read(path)], [], {path: predictions(count)}, NOW), "Predictions") for count in (3, 40)
    )
    assert few.count('class="right"') == 3
    assert "is one, said two (75% sure), loss 2.50, no. 17" in few
    assert "matrix" not in many
    assert '<th scope="row">class 39</th><td>class 38</td><td>39</td>' in many
    none = compose([read(path)], [], {path: "no predictions: no weights"}, NOW)
    assert "no predictions: no weights" in section(none, "Predictions")


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


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "which runs?"),
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
