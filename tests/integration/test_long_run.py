"""A run of a million lines is shown like a short one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from hvd_train.report import report
from hvd_train.report.watch import view
from hvd_train.run_files.history import History, RunReader
from tests.support.bombs import peak_growth
from tests.support.run_folders import START, epoch, event, start, step, write

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.long]

EPOCHS = 45_000  # of ten steps, before the second look and after it; every hundredth step is an event as well
MOST_MEMORY = 60e6  # bytes, where 15 MB were seen; the records themselves would take 1 GB
MOST_PAGE = 2e6


def lines(epochs: range) -> Iterator[str]:
    """The lines of these epochs."""
    of_a_step = json.dumps({**step(1), "time": -1, "epoch": -2, "step": -3, "samples": -4}) + "\n"
    for sign in ("-1", "-2", "-3", "-4"):
        of_a_step = of_a_step.replace(f": {sign},", ": %d,")
    for number in epochs:
        for place in range(number * 10 - 9, number * 10 + 1):
            yield of_a_step % (START + place, number, place, place * 100)
        if number % 10 == 0:
            yield json.dumps(event("skipped", number * 10, "the loss of a step is not finite")) + "\n"
        yield json.dumps(epoch(number, number * 10)) + "\n"


def append(path: Path, epochs: range) -> None:
    """Go on with the run."""
    with path.open("a") as file:
        file.writelines(lines(epochs))


def test_a_run_of_a_million_lines(tmp_path: Path) -> None:
    """Reading it takes the memory of a short one, a second look reads what is new, and the page stays small."""
    folder = write(tmp_path / "run", [start()])
    metrics, seen = folder / "metrics.jsonl", list[History]()
    append(metrics, range(1, EPOCHS + 1))
    reader = RunReader(folder)
    assert peak_growth(lambda: seen.append(reader.read())) < MOST_MEMORY
    first = metrics.stat().st_size
    append(metrics, range(EPOCHS + 1, 2 * EPOCHS + 1))
    before = bytes_read()
    assert peak_growth(lambda: seen.append(reader.read())) < MOST_MEMORY
    assert bytes_read() - before < 1.05 * (metrics.stat().st_size - first)
    before = bytes_read()
    run = reader.read()
    assert bytes_read() - before < 100_000
    shown = StringIO()
    Console(file=shown, width=120).print(view(run, START))
    assert "step 900,000" in shown.getvalue()
    page = list[str]()
    assert peak_growth(lambda: page.append(report.compose([run], [], {run.path: ""}, datetime.now()))) < MOST_MEMORY
    assert len(page[0].encode()) < MOST_PAGE
    assert (run.steps[-1]["step"], run.epochs[-1]["epoch"], run.num_events) == (900_000, 90_000, 9001)


def bytes_read() -> int:
    """The bytes that this process has read from files so far."""
    return int(Path("/proc/self/io").read_text().split()[1])
