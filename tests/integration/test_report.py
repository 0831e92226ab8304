"""The report of a real training in a browser."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hvd_train import cli
from tests.support.launching import HVD_TRAIN, launch_line, output_of
from tests.support.run_folders import elastic_run, section, start, step, whole_run, write

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
WRAPPER = """<!doctype html><meta charset="utf-8"><body style="margin: 0">
<iframe src="{page}" style="border: 0; width: {width}px; height: 800px; color-scheme: {scheme}"></iframe><pre></pre>
<script>onload = () => {{
  const frame = document.querySelector("iframe"), page = frame.contentDocument;
  const chart = page.querySelector("img.chart");
  const tabs = () => [...page.querySelectorAll(".tabs > .grid")].map(
    grid => frame.contentWindow.getComputedStyle(grid).display);
  chart.scrollIntoView();
  const found = {{
    width: page.documentElement.scrollWidth,
    charts: page.querySelectorAll("img.chart").length,
    whole: [...page.images].every(image => image.naturalWidth > 0),
    requests: frame.contentWindow.performance.getEntriesByType("resource").map(entry => entry.name.slice(0, 200)),
    chart: chart.getBoundingClientRect(), scale: chart.clientWidth / chart.naturalWidth, first: tabs(),
  }};
  const plot = chart.parentElement, box = plot.getBoundingClientRect();
  plot.dispatchEvent(new frame.contentWindow.PointerEvent("pointermove", {{clientX: box.left + box.width / 2}}));
  found.tip = plot.querySelector(".tip").innerText;
  const column = title => [...page.querySelectorAll("#s0 tbody tr")].map(row => row.cells[title]?.innerText);
  found.columns = [1, 2].map(() => (page.querySelectorAll("#s0 thead button")[0]?.click(), column(0)));
  page.querySelector("label[for=tab-1]").click();
  document.querySelector("pre").textContent = JSON.stringify({{...found, second: tabs()}});
}}</script>"""  # noqa: E501

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run folder of a short training on two ranks."""
    folder = tmp_path_factory.mktemp("trained")
    output_of(
        launch_line("gloo", 2, HVD_TRAIN, "train", "--epochs", "1", "--output-dir", "run"), folder
    )
    return folder / "run"


@pytest.fixture(scope="module")
def pages(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a report of the real run and a report of twenty different runs."""
    folder = tmp_path_factory.mktemp("pages")
    torn = write(
        folder / "runs" / "a-run-with-a-long-name-that-was-torn", [start(), step(1)], torn="{"
    )
    paths = [
        trained,
        torn,
        write(folder / "runs" / "elastic", elastic_run()),
        write(folder / "runs" / "none", []),
    ]
    lines = whole_run(2)
    paths += [
        write(folder / "runs" / f"seed-{n}", lines, seed=n, output_dir=Path("x" * 80))
        for n in range(16)
    ]
    made = {"one": folder / "one.html", "twenty": folder / "twenty.html"}
    assert cli.run(["report", str(trained), "--output", str(made["one"])]) == 0
    assert cli.run(["report", *map(str, paths), "--output", str(made["twenty"])]) == 0
    return made


def shown(page: Path, width: int, scheme: str) -> tuple[dict[str, Any], np.ndarray]:
    """Show a page at a width in pixels; return what a script finds in it, and the grey
    values of its first chart.
    """
    Path("wrapper.html").write_text(WRAPPER.format(page=page.as_uri(), width=width, scheme=scheme))
    line = (
        "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run "
        "--disable-background-networking --allow-file-access-from-files --user-data-dir=profile "
        "--enable-logging=stderr --window-size=1400,900 --screenshot=shown.png --dump-dom"
    )
    done = subprocess.run(
        [CHROMIUM, *line.split(), Path("wrapper.html").resolve().as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    found = json.loads(html.unescape(re.findall("<pre>(.+)</pre>", done.stdout)[0]))
    area = [found["chart"][edge] for edge in ("left", "top", "right", "bottom")]
    return found, np.asarray(Image.open("shown.png").crop(area).convert("L"), dtype=int)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH (apt-get install chromium)")
@pytest.mark.parametrize("name", ["one", "twenty"])
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_in_a_browser(pages: dict[str, Path], name: str, width: int, scheme: str) -> None:
    """A page has no errors, requests nothing, fits the width, and its charts have
    contrast; letters are not tiny.

    A chart shows its values at the pointer, and a click sorts the table.
    """
    found, chart = shown(pages[name], width, scheme)
    assert found["width"] <= width
    assert found["charts"] >= 10
    assert found["whole"]
    assert re.match(r"epochs [\d.]+\n[\d.]+ (training|run)", found["tip"])
    up, down = found["columns"]
    assert up == down[::-1]
    assert len(up) == len(set(up)) == {"one": 0, "twenty": 20}[name]
    assert {address.partition(":")[0] for address in found["requests"]} <= {"file", "data"}
    assert (found["first"], found["second"]) == (["grid", "none", "none"], ["none", "grid", "none"])
    paper = np.bincount(chart.flatten()).argmax()
    assert (paper < 60) if scheme == "dark" else (paper > 230)
    assert np.abs(chart - paper).max() > 120
    curves = section(pages[name].read_text(), "Learning curves")
    points = min(map(float, re.findall(r"font-size: ([\d.]+)px", curves)))
    assert points * 4 / 3 * found["scale"] >= 7  # pixels


def test_the_page_has_the_best_score_and_the_environment(
    trained: Path, pages: dict[str, Path]
) -> None:
    summary = json.loads((trained / "summary.json").read_text())
    page = pages["one"].read_text()
    assert f"{summary['best_top1']:.2%} (epoch 1)" in page
    facts = json.loads((trained / "environment.json").read_text())
    assert (facts["world_size"], sum(facts["ranks_of_hosts"].values())) == (2, 2)
    assert facts["command"].startswith("hvd-train train --epochs 1")
    assert facts["versions"]["horovod"] in page
