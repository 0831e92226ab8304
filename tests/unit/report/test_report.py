"""The report: its content, broken runs, and hostile text."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hvd_train import cli
from hvd_train.report.page import Chart
from tests.support.run_folders import (
    composed,
    elastic_run,
    epoch,
    event,
    section,
    start,
    step,
    whole_run,
    write,
)

NO_VALIDATION = epoch(1, val_loss=None, val_top1=None, val_top5=None)
CRAFTED = event("world", 2, "a lone surrogate: \ud800", previous_size="$x_{", world_size="$")
SKIPPED = event("skipped", 2, "step 2 is skipped: its loss is not finite", step=2)
BROKEN = {
    "no validation": ([start(), step(1), step(2), NO_VALIDATION], "validation: no values"),
    "interrupted": ([start(), step(1), step(2)], "broke off (killed or failed)"),
    "no step": ([start()], "no values"),
    "NaN": ([start(), step(1), step(2, loss=None), SKIPPED, step(3)], "not finite"),
    "elastic": (elastic_run(), "3→2"),
    "crafted": ([start(), step(1), CRAFTED, step(3)], "$x_{→$"),
}
HOSTILE = """x" onload="alert(1)' onclick='alert(2) <script>alert(3)</script> &amp; {{ 7 * 7 }}"""


@pytest.fixture
def _no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chart, "shown", lambda chart: (b"", "{}"))


@pytest.mark.parametrize("name", BROKEN)
def test_any_broken_run_has_a_page(name: str) -> None:
    """Each section is there and names missing values."""
    lines, expected = BROKEN[name]
    text = composed(write(Path("a run"), lines))
    headings = (
        "Summary",
        "Learning curves",
        "Throughput",
        "Where the time goes",
        "Configuration",
        "Environment",
    )
    sections = [section(text, heading) for heading in headings]
    assert all(each.strip() for each in sections)
    assert text.encode()
    assert expected in "".join(sections)


@pytest.mark.usefixtures("_no_charts")
def test_many_runs_share_a_page() -> None:
    """Settings that differ are columns; what is equal stands above the table."""
    paths = [write(Path("runs", name), lines) for name, (lines, _) in BROKEN.items()]
    paths += [write(Path(f"runs/good-{number}"), whole_run(), seed=number) for number in range(10)]
    text = composed(*paths)
    equal, _, different = section(text, "Summary").partition("<table")
    assert re.findall(r'<th scope="row">(.*?)</th>', different) == [path.name for path in paths]
    assert "<dt>model</dt><dd>digits-convnet</dd>" in equal
    differs, _, same = section(text, "Configuration").partition("What all runs share")
    assert re.findall(r'<th scope="col">(.*?)</th>', differs) == ["run", "seed"]
    assert '<tr><th scope="row">good-9</th><td>9</td></tr>' in differs
    assert "global_batch_size" in same


@pytest.mark.usefixtures("_no_charts")
def test_runs_of_one_name_are_named_with_their_folders() -> None:
    names = ("a/digits", "b/digits")
    text = section(composed(*(write(Path(name), []) for name in names)), "Summary")
    assert all(name in text for name in names)


def test_changes_of_the_world_are_marked() -> None:
    text = composed(write(Path("run"), elastic_run()))
    for part in ("Learning curves", "Throughput"):
        for label in ("3→2", "recovered", "resumed"):
            assert label in section(text, part)


@pytest.mark.usefixtures("_no_charts")
def test_the_time_split_and_the_load_of_gpus_are_shown() -> None:
    parts = ("data", "forward", "backward", "reduction", "optimizer", "other")
    split = dict(zip(parts, (0.01, 0.02, 0.04, 0.02, 0.005, 0.005), strict=True))
    loads = [{"utilization": 0.5}, {}, {"utilization": 0.75, "power_w": 400.0}]
    steps = [step(number, split=split, gpu=load) for number, load in enumerate(loads, 1)]
    new = write(Path("new"), [start(), *steps, epoch(1, peak_memory_gib=1.5)])
    old = write(Path("old"), whole_run())
    alone = section(composed(new), "Summary")
    assert "1.50 GiB a rank, GPU 62% busy, 400 W" in alone
    assert "10.5 s" in alone
    assert "Seconds of an epoch" in section(composed(new), "Throughput")
    part = section(composed(new, old), "Where the time goes")
    for words in ("100.00 ms", "40.00 ms · 40%", "<td>not measured</td>"):
        assert words in part


class Elements(HTMLParser):
    """Tags, attributes and text of a page, as in a browser."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tags = []
        self.attributes = []
        self.text = ""
        self.feed(markup)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def test_text_of_a_run_is_escaped() -> None:
    """The page loads nothing from outside, and the browser runs one script."""
    name = HOSTILE.replace("/", "")
    events = [event("note", 1, HOSTILE), event("world", 2, HOSTILE)]
    path = write(Path(name), [start(), step(1), *events], model=HOSTILE)
    facts = {"command": HOSTILE, "device": HOSTILE, "versions": {"a": HOSTILE}}
    (path / "environment.json").write_text(json.dumps(facts))
    page = composed(path, write(Path("other"), []))
    elements = Elements(page)
    assert elements.text.count(HOSTILE) >= 6
    assert name in elements.text
    assert any(name in str(value) for key, value in elements.attributes if key == "alt")
    assert elements.tags.count("script") == 1
    assert not {key for key, _ in elements.attributes} & {"onload", "onclick"}
    for key, value in elements.attributes:
        assert key not in ("href", "src") or value.startswith(("data:", "#"))
    script = re.findall("<script>(.*?)</script>", page, re.DOTALL)[0].encode()
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    allowed = f"style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    assert ("http-equiv", "Content-Security-Policy") in elements.attributes
    assert ("content", f"default-src 'none'; {allowed}") in elements.attributes


@pytest.mark.usefixtures("_no_charts")
def test_only_reports_are_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    write(Path("run"), whole_run())
    line = ["report", "run", "--output"]
    for _ in range(2):
        assert cli.run([*line, "page.html"]) == 0
        assert capsys.readouterr().out == "report: page.html\n"
    Path("mine.html").write_text("<p>mine")
    assert cli.run([*line, "mine.html"]) == 2
    assert "is no report of hvd-train" in capsys.readouterr().err
    assert Path("mine.html").read_text() == "<p>mine"


def drawn(*lines: tuple[float | None, ...]) -> tuple[str, Any]:
    """Return the image of a chart and its values."""
    named = [(f"run {number}", range(len(values)), values) for number, values in enumerate(lines)]
    image, values = Chart("Loss", "epochs", named).shown()
    return image.decode(), json.loads(values)


@pytest.mark.parametrize(
    ("values", "pieces"),
    [((1, 2, 3), 1), ((1, 2, None, 3, 4, float("nan"), 5, 6, float("inf"), 7, 8), 4)],
)
def test_missing_values_are_gaps(values: tuple[float | None, ...], pieces: int) -> None:
    image, _ = drawn(values)
    path, *_ = re.findall(r'<path d="([^"]*)"[^>]*stroke: #0063a6; stroke-width: 1.5', image)
    assert path.count("M") == pieces


def test_a_diverged_run_leaves_the_others_visible() -> None:
    """The axis is logarithmic then; the values for the pointer are those of the lines."""
    lines = [(2.5, None), (1e9, 2.0), (2.0, 1.0)]
    image, values = drawn(*lines)
    assert "1e+06" in image
    assert [tuple(line["y"]) for line in values["lines"]] == lines
