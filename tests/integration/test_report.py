"""The report of a real training, in the browser in which its users open it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvd_train import cli
from hvd_train.report.predictions import predict
from tests.support.browser import CHROMIUM, Browser, opened
from tests.support.launching import HVD_TRAIN, finished, launch_line
from tests.support.run_folders import epoch, event, start, step, whole_run, write

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run folder of a short training on two ranks."""
    folder = tmp_path_factory.mktemp("trained")
    command = launch_line("gloo", 2, HVD_TRAIN, "train", "--epochs", "1", "--output-dir", "run")
    code, output = finished(command, folder)
    assert code == 0, output
    return folder / "run"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Return a tab of Chromium for all tests of this file."""
    if CHROMIUM is None:
        pytest.skip("no chromium on the PATH (apt-get install chromium)")
    with opened(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture(scope="module")
def pages(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a report of the real run with its predictions, and one of twenty runs of every kind."""
    folder = tmp_path_factory.mktemp("pages")
    lines = whole_run(2)
    torn = write(folder / "runs" / "a-run-with-a-long-name-that-was-torn", [start(), step(1)], torn="{")
    events = [event("world", 15.5, step=16, previous_size=3, world_size=2, why="a rank was lost", seconds=1.0)]
    paths = [trained, torn, write(folder / "runs" / "elastic", lines + events), write(folder / "runs" / "none", [])]
    gaps = {"val_loss": None, "val_top1": None, "val_top5": None}
    paths.append(write(folder / "runs" / "unseen", [start(), step(1), step(2, loss=None), epoch(1, **gaps)]))
    paths += [write(folder / "runs" / f"seed-{n}", lines, seed=n, output_dir=Path("x" * 80)) for n in range(15)]
    made = {"one": folder / "one.html", "twenty": folder / "twenty.html"}
    assert cli.run(["report", str(trained), "--output", str(made["one"])]) == 0
    assert cli.run(["report", *map(str, paths), "--no-predictions", "--output", str(made["twenty"])]) == 0
    return made


@pytest.mark.parametrize("name", ["one", "twenty"])
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (360, False), (360, True)])
def test_in_a_browser(browser: Browser, pages: dict[str, Path], name: str, width: int, dark: bool) -> None:
    """A page writes nothing to the console, requests nothing from a network, fits the width, and has contrast."""
    browser.open(pages[name], width=width, dark=dark)
    assert browser.complaints() == []
    assert {address.partition(":")[0] for address in browser.requests()} <= {"file", "data"}
    assert browser.value("document.documentElement.scrollWidth") <= width
    wide = "[...document.querySelectorAll('.scroll')].filter(box => box.scrollWidth > box.clientWidth + 1).length"
    assert browser.value(wide) == 0 or width > 500  # at a desk, a table of many settings may scroll in its own box
    assert browser.value("document.querySelectorAll('svg').length") >= 10
    colours = "getComputedStyle(document.querySelector({!r})).{}"
    ink = brightness(browser.value(colours.format("h1", "color")))
    paper = brightness(browser.value(colours.format("section", "backgroundColor")))
    line = brightness(browser.value(colours.format("svg path[style*=tone-0]", "stroke")))
    assert (ink - paper if dark else paper - ink) > 150
    assert abs(line - paper) > 60


def brightness(colour: str) -> float:
    """Return the brightness of `rgb(r, g, b)`, from 0 to 255."""
    red, green, blue = (int(part) for part in re.findall(r"\d+", colour)[:3])
    return 0.3 * red + 0.6 * green + 0.1 * blue


def test_the_axis_is_chosen_without_a_script(browser: Browser, pages: dict[str, Path]) -> None:
    """A click on `time` shows the curves over time in place of those over epochs."""
    browser.open(pages["one"], width=1280)
    shown = "[...document.querySelectorAll('.tabs > .grid')].map(grid => getComputedStyle(grid).display)"
    assert browser.value(shown) == ["grid", "none", "none"]
    browser.value("document.querySelector('label[for=tab-2]').click()")
    assert browser.value(shown) == ["none", "none", "grid"]


def test_text_is_large_enough_on_a_phone(browser: Browser, pages: dict[str, Path]) -> None:
    """The smallest letters of a chart are 7 pixels high on a page that is 360 wide."""
    browser.open(pages["one"], width=360)
    heights = browser.value(
        "[...document.querySelectorAll('.tab-0 svg text')].map(text =>"
        " parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a)"
    )
    assert heights
    assert min(heights) >= 7


def test_the_matrix_is_what_evaluate_says(trained: Path, pages: dict[str, Path]) -> None:
    """The predictions of the best weights add up to the scores that training has recorded."""
    found = predict(trained, "cpu")
    right = sum(count for (truth, said), count in found.counts.items() if truth == said)
    total = sum(found.counts.values())
    summary = json.loads((trained / "summary.json").read_text())
    assert total == 360
    assert right / total == pytest.approx(summary["best_top1"])
    assert [one.loss for one in found.worst] == sorted((one.loss for one in found.worst), reverse=True)
    assert all(one.truth != one.predicted for one in found.worst)
    assert f"{right:,} of 360 validation images right" in pages["one"].read_text()


def test_a_run_notes_its_environment(trained: Path, pages: dict[str, Path]) -> None:
    """Versions, hosts and device are in the run folder and in the report."""
    facts = json.loads((trained / "environment.json").read_text())
    assert facts["world_size"] == 2
    assert sum(facts["ranks_of_hosts"].values()) == 2
    assert facts["command"].startswith("hvd-train train --epochs 1")
    assert facts["versions"]["horovod"] in pages["one"].read_text()


def test_runs_without_weights_or_data_have_a_reason(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run without an evaluation, damaged weights or missing data do not end the report, which says why."""
    write(Path("early"), [start(), step(1)])
    damaged = write(Path("damaged"), whole_run())
    (damaged / "model-best.pt").write_bytes(b"no weights")
    gone = write(Path("gone"), whole_run(), data="folder", data_dir=Path("nowhere"))
    (gone / "model-best.pt").write_bytes((trained / "model-best.pt").read_bytes())
    assert cli.run(["report", "early", "damaged", "gone"]) == 0
    assert capsys.readouterr().out == "report: report.html\n"
    text = Path("report.html").read_text()
    assert "early: no predictions: early has no model-best.pt yet" in text
    assert "damaged: no predictions: cannot read the weights" in text
    assert re.search(r"gone: no predictions: .*nowhere", text)
