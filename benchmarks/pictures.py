"""Make the pictures of README.md from a real run, in which a worker is killed.

Needs chromium on the PATH.

python benchmarks/pictures.py docs/pictures
"""

import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from PIL import Image
from rich.console import Console
from rich.text import Text

PROGRAM = str(Path(sys.executable).with_name("hvd-train"))
TRAINING = ["train", "digits", "--epochs", "60", "--output-dir", "digits"]


def train(folder: Path) -> None:
    """Train on three workers, and kill one after 20 epochs."""
    line = [PROGRAM, "launch", "--elastic", "--np", "3", "--", *TRAINING]
    job = subprocess.Popen(line, cwd=folder)
    metrics = folder / "digits" / "metrics.jsonl"
    killed = False
    while job.poll() is None:
        time.sleep(0.2)
        lines = metrics.read_text().splitlines() if metrics.exists() and not killed else []
        if any(json.loads(line).get("epoch", 0) >= 20 for line in lines[:-1]):
            family = psutil.Process(job.pid).children(recursive=True)
            workers = [one for one in family if one.cmdline()[1:3] == [PROGRAM, "train"]]
            workers[-1].kill()
            killed = True
    assert job.returncode == 0
    assert killed


def picture(page: Path, target: Path, width: int, height: int) -> None:
    """Write a picture of the top of a page, in few colours."""
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        size = [f"--window-size={width},{height}", "--hide-scrollbars", f"--screenshot={shot}"]
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", *size, page.as_uri()]
        subprocess.run(command, check=True, capture_output=True)
        Image.open(shot).convert("RGB").quantize(64).save(target, optimize=True)


def of_recovery(part: re.Match[str]) -> str:
    """Return a section of a report if it is about speed or events, else nothing."""
    return part[0] if re.search("<h2[^>]*>(Throughput|What happened)", part[0]) else ""


def main() -> int:
    """Train, and write report.png, recovery.png and watch.png."""
    target = Path(sys.argv[1]).resolve()
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train(folder)
        page = folder / "report.html"
        subprocess.run([PROGRAM, "report", "digits", "--output", str(page)], cwd=folder, check=True)
        picture(page, target / "report.png", 1000, 860)
        page.write_text(
            re.sub(
                "<section.*?</section>|<h1.*?</nav>", of_recovery, page.read_text(), flags=re.DOTALL
            )
        )
        picture(page, target / "recovery.png", 1000, 860)
        environment = {**os.environ, "COLUMNS": "96", "FORCE_COLOR": "1", "TERM": "xterm-256color"}
        watch = [PROGRAM, "watch", "digits", "--once"]
        shown = subprocess.run(
            watch, cwd=folder, env=environment, check=True, capture_output=True, text=True
        ).stdout
        console = Console(record=True, width=96, file=io.StringIO(), force_terminal=True)
        console.print(Text.from_ansi(shown), end="")
        page.write_text(
            f"<body style='margin: 0'>{console.export_svg(title='hvd-train watch digits')}"
        )
        picture(page, target / "watch.png", 1200, 620)
    return 0


if __name__ == "__main__":
    sys.exit(main())
