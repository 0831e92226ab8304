"""Draw the pictures of the documents, docs/pictures/*.png, from real trainings: `make pictures`.

Two trainings of the digits on two ranks of this machine: one by horovodrun, and an elastic one of which a worker gets
`kill -9`. It takes two minutes on two cores, and needs Chromium. What it shows has the name of this machine.
"""

from __future__ import annotations

import io
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from PIL import Image
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

from tests.support.browser import CHROMIUM, Browser, opened
from tests.support.launching import HVD_TRAIN, finished, launch_line, ranks_of, started, wait_for

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
MOST_BYTES = 120_000
_COLUMNS = 124  # of a terminal: no line of a training or of `watch` is longer
_VARIABLES = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
_COLOURS = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": str(_COLUMNS)}
_NONE: Mapping[str, str] = MappingProxyType({})
_LIMIT_S = 1500.0  # of a training; a minute on two cores with nothing else to do
_SCALE = 1.25  # pixels of a picture for one of a page: documents show pictures smaller than they are
_REPORT = {"width": 900, "sections": 2}  # pixels of the window, and the sections that the picture has
_TERMINAL = """<!doctype html><meta charset="utf-8"><style>
  body {{ margin: 0 }}
  pre {{ display: inline-block; margin: 0; padding: 14px 16px; border: 1px solid #d0d7de;
         font: 14px/1.3 "DejaVu Sans Mono", monospace; color: {foreground}; background: {background} }}
</style><pre>{code}</pre>"""


def main() -> None:
    """Train, draw and write the pictures. Raises AssertionError where a training does not do what it is to show."""
    assert CHROMIUM is not None, "there is no Chromium on the PATH: apt install chromium"
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hvd_train-") as name:
        folder = Path(name)
        with opened(folder / "profile") as browser:
            browser.call("Emulation.setScrollbarsHidden", hidden=True)
            draw_report(browser, folder)
            draw_recovery(browser, folder)


def draw_report(browser: Browser, folder: Path) -> None:
    """Draw the first sections of the page about a training by horovodrun."""
    succeed(launch_line("gloo", 2, HVD_TRAIN, "train", "digits", "--output-dir", "runs/digits"), folder)
    succeed([HVD_TRAIN, "report", "runs/digits", "--output", "report.html"], folder)
    browser.open(folder / "report.html", width=_REPORT["width"])
    end = f"document.querySelectorAll('section')[{_REPORT['sections']}].getBoundingClientRect().top + scrollY"
    write(browser, "report", _REPORT["width"], int(browser.value(end)))


def draw_recovery(browser: Browser, folder: Path) -> None:
    """Draw the terminal of an elastic training whose worker is killed, and `watch` after another one has come."""
    typed = "horovodrun_scripts/train_elastic.sh -- digits --ledger"
    script, *arguments = typed.split()
    output = folder / "elastic.txt"

    def has_printed(words: str) -> bool:
        return re.search(words, output.read_text()) is not None

    with started([str(ROOT / script), *arguments], folder, output, _VARIABLES) as job:
        wait_for("the third epoch", lambda: has_printed(r"epoch +3/"), _LIMIT_S)
        ranks = [one for one in ranks_of(job, "train") if one.cmdline()[1].endswith("hvd-train")]
        killed = max(ranks, key=lambda one: one.pid)
        before = len(output.read_text().splitlines())
        killed.kill()
        wait_for("a world of two again", lambda: has_printed("world 1 -> 2"), _LIMIT_S)
        wait_for("some more epochs", lambda: has_printed(r"epoch +14/"), _LIMIT_S)
        (run,) = (folder / "runs").glob("digits-*")
        watched = succeed([HVD_TRAIN, "watch", f"runs/{run.name}", "--once"], folder, _COLOURS)
        assert job.wait(_LIMIT_S) == 0, output.read_text()
    audited = succeed([HVD_TRAIN, "audit", f"runs/{run.name}"], folder)
    lines = output.read_text().splitlines()
    kill = f"$ kill -9 {killed.pid}    # one of the two workers, in another terminal"
    shown = Text("\n").join(
        [
            Text(f"$ {typed}", style="bold"),
            *map(Text, lines[:before]),
            Text(f"{kill:>100}", style="bold red"),
            *(Text(line, style="bold blue" if line.startswith("world ") else "") for line in lines[before:]),
            Text(f"$ hvd-train audit runs/{run.name}", style="bold"),
            *map(Text, audited.splitlines()),
        ]
    )
    draw_terminal(browser, folder, "recovery", shown)
    draw_terminal(browser, folder, "watch", Text.from_ansi(watched.rstrip("\n")))


def succeed(command: list[str], folder: Path, variables: Mapping[str, str] = _NONE) -> str:
    """Run a program to its end and return what it printed. Raises AssertionError where it fails."""
    code, printed = finished(command, folder, _LIMIT_S, {**_VARIABLES, **variables})
    assert code == 0, printed
    return printed


def draw_terminal(browser: Browser, folder: Path, name: str, text: Text) -> None:
    """Draw text as a terminal with a white background shows it."""
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(text, soft_wrap=True, highlight=False)
    page = folder / f"{name}.html"
    html = console.export_html(theme=DEFAULT_TERMINAL_THEME, inline_styles=True, code_format=_TERMINAL)
    page.write_text(html, encoding="utf-8")
    browser.open(page, width=1600)
    width, height = (browser.value(f"document.querySelector('pre').offset{side}") for side in ("Width", "Height"))
    write(browser, name, width, height)


def write(browser: Browser, name: str, width: int, height: int) -> None:
    """Write the left upper part of what the browser shows as a small picture. Raises AssertionError for a large one."""
    path = PICTURES / f"{name}.png"
    with Image.open(io.BytesIO(browser.picture(width, height, _SCALE))) as image:
        image.convert("RGB").quantize(32, dither=Image.Dither.NONE).save(path, optimize=True)
        size = path.stat().st_size
        print(f"{path.relative_to(ROOT)}: {image.width} x {image.height} pixels, {size:,} bytes")
    assert size <= MOST_BYTES, f"{path} is larger than {MOST_BYTES:,} bytes"


if __name__ == "__main__":
    main()
