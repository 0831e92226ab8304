"""The report: its content, broken runs, and hostile text."""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

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
BROKEN: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no validation": (
        lambda path: write(path, [start(), step(1), step(2), NO_VALIDATION]),
        "validation: no values",
    ),
    "interrupted": (
        lambda path: write(path, [start(), step(1), step(2)]),
        "broke off (killed or failed)",
    ),
    "no step": (lambda path: write(path, [start()]), "no values"),
    "NaN": (
        lambda path: write(path, [start(), step(1), step(2, loss=None), SKIPPED, step(3)]),
        "not finite",
    ),
    "elastic": (lambda path: write(path, elastic_run()), "3→2"),
    "crafted": (lambda path: write(path, [start(), step(1), CRAFTED, step(3)]), "$x_{→$"),
}
HOSTILE = """x" onload="alert(1)' onclick='alert(2) <script>alert(3)</script> &amp; {{ 7 * 7 }}"""


@pytest.fixture
def _no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chart, "shown", lambda chart: (b"", "{}"))


@pytest.mark.parametrize("name", BROKEN)
def test_any_broken_run_has_a_page(name: str) -> None:
    """Each section is there and names missing values."""
    make, expected = BROKEN[name]
    text = composed(make(Path("a run")))
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
    paths = [make(Path(f"runs/{name}")) for name, (make, _) in BROKEN.items()]
    paths += [write(Path(f"runs/good-{number}"), whole_run(), seed=number) for number in range(10)]
    text = composed(*paths)
    equal, _, different = section(text, "Summary").partition("<table")
    for path in paths:
        assert f'<th scope="row">{path.name}</th>' in different
    assert "<dt>model</dt><dd>digits-convnet</dd>" in equal
    differs, _, same = section(text, "Configuration").partition("What all runs share")
    assert re.findall(r'<th scope="col">(.*?)</th>', differs) == ["run", "seed"]
    assert '<tr><th scope="row">good-9</th><td>9</td></tr>' in differs
    assert "global_batch_size" in same
    names = ("a/digits", "b/digits")
    text = section(composed(*(write(Path(name), []) for name in names)), "Summary")
    assert all(name in text for name in names)


def test_changes_of_the_world_and_the_time_split_are_shown() -> None:
    text = composed(write(Path("run"), elastic_run()))
    for part in ("Learning curves", "Throughput"):
        for label in ("3→2", "recovered", "resumed"):
            assert label in section(text, part)
    parts = ("data", "forward", "backward", "reduction", "optimizer", "other")
    split = dict(zip(parts, (0.01, 0.02, 0.04, 0.02, 0.005, 0.005), strict=True))
    loads = [{"utilization": 0.5}, {}, {"utilization": 0.75, "power_w": 400.0}]
    steps = [step(number, split=split, gpu=load) for number, load in enumerate(loads, 1)]
    new = write(Path("new"), [start(), *steps, epoch(1, peak_memory_gib=1.5)])
    text = composed(new)
    assert "1.50 GiB a rank, GPU 62% busy, 400 W" in section(text, "Summary")
    assert "Seconds of an epoch" in section(text, "Throughput")
    assert "10.5 s" in section(text, "Summary")
    part = section(composed(new, write(Path("old"), whole_run())), "Where the time goes")
    for words in ("100.00 ms", "40.00 ms · 40%", "<td>not measured</td>"):
        assert words in part


class Elements(HTMLParser):
    """Tags, attributes and text of a page, as in a browser."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(markup)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_text_of_a_run_is_escaped() -> None:
    """The page loads nothing from outside, and the browser runs one script."""
    name = HOSTILE.replace("/", "")
    path = write(
        Path(name),
        [start(), step(1), event("note", 1, HOSTILE), event("world", 2, HOSTILE)],
        model=HOSTILE,
    )
    facts = {"command": HOSTILE, "device": HOSTILE, "versions": {"a": HOSTILE}}
    (path / "environment.json").write_text(json.dumps(facts))
    elements = Elements(page := composed(path, write(Path("other"), [])))
    assert elements.text.count(HOSTILE) >= 6
    assert name in elements.text
    assert any(name in str(found.get("alt")) for _, found in elements.tags)
    assert [tag for tag, _ in elements.tags].count("script") == 1
    assert not {name for _, found in elements.tags for name in found} & {"onload", "onclick"}
    targets = [
        str(found[name]) for _, found in elements.tags for name in ("href", "src") if name in found
    ]
    assert not [target for target in targets if not target.startswith(("data:", "#"))]
    policies = [found["content"] for _, found in elements.tags if found.get("http-equiv")]
    script = re.findall("<script>(.*?)</script>", page, re.DOTALL)[0].encode()
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    allowed = f"style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    assert policies == [f"default-src 'none'; {allowed}"]


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


def drawn(*lines: tuple[float | None, ...]) -> str:
    named = [(f"run {number}", range(len(values)), values) for number, values in enumerate(lines)]
    return Chart("Loss", "epochs", named).shown()[0].decode()


def pieces(text: str) -> int:
    """Return the number of pieces of the first line of a chart."""
    path, *_ = re.findall(r'<path d="([^"]*)"[^>]*stroke: #0063a6; stroke-width: 1.5', text)
    return str(path).count("M")


def test_missing_values_are_gaps() -> None:
    assert pieces(drawn((1, 2, 3, 4, 5, 6, 7))) == 1
    assert pieces(drawn((1, 2, None, 3, 4, float("nan"), 5, 6, float("inf"), 7, 8))) == 4
    assert "no values" in drawn()
    two = drawn((1, 2), (None, float("nan")))
    assert "run 1: no values" in two
    assert "run 0: no values" not in two


def test_a_diverged_run_leaves_the_others_visible() -> None:
    """The axis is logarithmic then; the values for the pointer are those of the lines."""
    chart = Chart(
        "Loss",
        "epochs",
        [("a", (1, 2), (2.5, None)), ("b", (1, 2), (1e9, 2.0)), ("c", (1, 2), (2.0, 1.0))],
    )
    image, values = chart.shown()
    assert "1e+06" in image.decode()
    assert [line["y"] for line in json.loads(values)["lines"]] == [
        [2.5, None],
        [1e9, 2.0],
        [2.0, 1.0],
    ]
