"""The report of a real training in a browser."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hvd_train import cli
from tests.support.browser import CHROMIUM, Browser, opened
from tests.support.launching import HVD_TRAIN, launch_line, output_of
from tests.support.run_folders import epoch, event, section, start, step, whole_run, write

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run folder of a short training on two ranks."""
    folder = tmp_path_factory.mktemp("trained")
    command = launch_line("gloo", 2, HVD_TRAIN, "train", "--epochs", "1", "--output-dir", "run")
    output_of(command, folder)
    return folder / "run"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium on the PATH (apt-get install chromium)")
    with opened(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture(scope="module")
def pages(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a report of the real run with its predictions, and a report of twenty different runs."""
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
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (360, True)])
def test_in_a_browser(browser: Browser, pages: dict[str, Path], name: str, width: int, dark: bool) -> None:
    """A page has no errors, requests nothing from a network, fits the width, and its charts have contrast."""
    browser.open(pages[name], width=width, dark=dark)
    assert browser.complaints() == []
    assert {address.partition(":")[0] for address in browser.requests()} <= {"file", "data"}
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.value("document.querySelectorAll('img.chart').length") >= 10
    assert browser.value("[...document.images].every(image => image.naturalWidth > 0)")
    shown = np.asarray(browser.picture("img.chart").convert("L"), dtype=int)
    paper = np.bincount(shown.flatten()).argmax()
    assert (paper < 60) if dark else (paper > 230)
    assert np.abs(shown - paper).max() > 120


def test_tabs_and_letters_on_a_phone(browser: Browser, pages: dict[str, Path]) -> None:
    """A click on `time` shows the curves over time; no letter of a chart is smaller than 7 pixels."""
    browser.open(pages["one"], width=360)
    shown = "[...document.querySelectorAll('.tabs > .grid')].map(grid => getComputedStyle(grid).display)"
    assert browser.value(shown) == ["grid", "none", "none"]
    points = min(map(float, re.findall(r"font-size: ([\d.]+)px", section(pages["one"].read_text(), "Learning curves"))))
    scale = browser.value("(image => image.clientWidth / image.naturalWidth)(document.querySelector('.chart'))")
    assert points * 4 / 3 * scale >= 7
    browser.value("document.querySelector('label[for=tab-2]').click()")
    assert browser.value(shown) == ["none", "none", "grid"]


def test_the_page_has_the_scores_and_the_environment(trained: Path, pages: dict[str, Path]) -> None:
    """The predictions of the best weights add up to the recorded score."""
    summary = json.loads((trained / "summary.json").read_text())
    page = pages["one"].read_text()
    assert f"{summary['best_top1'] * 360:.0f} of 360 validation images right" in page
    facts = json.loads((trained / "environment.json").read_text())
    assert (facts["world_size"], sum(facts["ranks_of_hosts"].values())) == (2, 2)
    assert facts["command"].startswith("hvd-train train --epochs 1")
    assert facts["versions"]["horovod"] in page
