"""Make the pictures of README.md from a real run, in which a worker is killed.

Needs chromium on the PATH.

    python -m benchmarks.pictures docs/pictures
"""

import io
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from rich.console import Console

from hvd_train.report.watch import view
from hvd_train.run_files.history import read
from tests.support.launching import ranks_of, records, started, wait_for

PROGRAM = str(Path(sys.executable).with_name("hvd-train"))
TRAINING = ["train", "digits", "--epochs", "60", "--output-dir", "digits"]


def train(folder: Path) -> None:
    """Train on three workers, and kill one after 20 epochs."""
    line = [PROGRAM, "launch", "--elastic", "--np", "3", "--", *TRAINING]
    with started(line, folder, folder / "output.txt") as job:
        wait_for("20 epochs", lambda: len(records("epoch", folder / "digits")) >= 20)
        ranks_of(job, "digits")[-1].kill()
        assert job.wait() == 0


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


def main() -> None:
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
        console = Console(record=True, width=96, file=io.StringIO())
        console.print(view(read(folder / "digits"), time.time()))
        page.write_text(
            f"<body style='margin: 0'>{console.export_svg(title='hvd-train watch digits')}"
        )
        picture(page, target / "watch.png", 1200, 620)


if __name__ == "__main__":
    main()
