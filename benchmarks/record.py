"""Where records of measurements go, and what each says of itself."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

RECORDS = Path(__file__).parent / "records"


def about(module: str, options: Sequence[str]) -> dict[str, Any]:
    """The command, the day, the machine and the commit."""
    revision = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(revision, cwd=RECORDS, capture_output=True, text=True, check=True)
    return {
        "command": " ".join(["python -m", module, *options]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"cores": psutil.cpu_count(), "system": platform.release(), "torch": torch.__version__},
        "commit": commit.stdout.strip(),
    }


def at_least(aim: float, interval: Sequence[float]) -> str:
    """What is said of such an aim: only a whole interval is on one side of it."""
    low, high = interval
    return "met" if low >= aim else "not met" if high < aim else "not told apart"


def at_most(aim: float, interval: Sequence[float]) -> str:
    """As `at_least`, of the other side."""
    low, high = interval
    return "met" if high <= aim else "not met" if low > aim else "not told apart"
