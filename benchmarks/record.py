"""The records of the benchmarks: where they lie, how they were made, what is sure, and whether an aim is met."""

from __future__ import annotations

import json
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

RECORDS = Path(__file__).parent / "records"


def about(module: str, options: Sequence[str]) -> dict[str, Any]:
    """Return the command, the day, the machine and the commit of a measurement.

    Raises subprocess.CalledProcessError outside of a clone with git.
    """
    revision = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(revision, cwd=RECORDS, capture_output=True, text=True, check=True)
    return {
        "command": " ".join(["python -m", module, *options]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"cores": psutil.cpu_count(), "system": platform.release(), "torch": torch.__version__},
        "commit": commit.stdout.strip(),
    }


def show(record: Mapping[str, Any], path: Path | None) -> None:
    """Print a record as JSON, and write it to `path` where there is one."""
    text = json.dumps(record, indent=1)
    print(text)
    if path is not None:
        path.write_text(text + "\n")


def interval(values: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """Return the 95% interval of the median of values by the bootstrap (Efron 1979), from a fixed seed."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def at_least(aim: float, ends: Sequence[float]) -> str:
    """Return whether values are at least `aim`: met or not met only where the whole interval is on one side of it."""
    low, high = ends
    return "met" if low >= aim else "not met" if high < aim else "not told apart"


def at_most(aim: float, ends: Sequence[float]) -> str:
    """Return whether values are at most `aim`: met or not met only where the whole interval is on one side of it."""
    low, high = ends
    return "met" if high <= aim else "not met" if low > aim else "not told apart"
