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
