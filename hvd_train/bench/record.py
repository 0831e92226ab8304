"""What every measurement records about itself: means with their intervals, versions, hardware, command. No torch."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_train import plain_file
from hvd_train.errors import UsageError
from hvd_train.run_files import durable, machine

Record = dict[str, Any]
"""The result of a measurement as JSON has it; docs/measuring.md explains its keys."""

# Student's t for 95%, by degrees of freedom from 1 on; beyond the table it is 1.96 + 2.4 / degrees, to 0.3%.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)


@dataclass(frozen=True)
class Estimate:
    """The geometric mean of repetitions and its 95% interval, which lies evenly around the mean's logarithm.

    `half_width` is half the width of the interval of the logarithm; NaN where there was one repetition only.
    """

    mean: float
    half_width: float

    @property
    def interval(self) -> list[float] | None:
        """The two ends of the interval, for JSON, both above 0; None where it is not known."""
        if math.isnan(self.half_width):
            return None
        ends = (math.exp(math.log(self.mean) + sign * self.half_width) for sign in (-1, 1))
        return [float(f"{end:.9g}") for end in ends]


def estimate(values: Sequence[float]) -> Estimate:
    """Return the geometric mean of values above 0 and its 95% interval, by Student's t on their logarithms.

    The few values alone tell how much they scatter, so that an interval around their sum could reach below 0, where
    there is neither a speed nor a time.
    """
    mean = statistics.geometric_mean(values)
    if len(values) < 2:
        return Estimate(mean, math.nan)
    degrees = len(values) - 1
    t = _T[degrees - 1] if degrees <= len(_T) else 1.96 + 2.4 / degrees
    return Estimate(mean, t * statistics.stdev(map(math.log, values)) / math.sqrt(len(values)))


def written(value: float, like: float | None = None) -> str:
    """Write a number with at least three digits, or with as many decimals as `like` would have."""
    size = abs(value if like is None else like)
    return f"{value:,.{max(0, 2 - math.floor(math.log10(size))) if size else 0}f}"


def about(tool: str, arguments: Sequence[str]) -> Record:
    """Return the command, the day, the versions and the hardware of this host."""
    return {
        "bench": tool,
        "command": shlex.join(["hvd-train", "bench", tool, *arguments]),
        "date": time.strftime("%Y-%m-%d"),
        "versions": machine.versions(),
        "hardware": {
            "processor": machine.processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
            "gpus": _gpus(),
            "system": f"{platform.system()} {platform.release()}",
        },
    }


def check_target(path: Path | None, tool: str) -> None:
    """Check, before anything is measured, that a record of this tool can be written to `path`.

    An earlier record of the same tool may be replaced, nothing else. Raises UsageError where it cannot be written.
    """
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"--json {path} is a folder; name a file")
    if not path.parent.is_dir():
        raise UsageError(f"--json {path}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"--json {path}: the folder {path.parent} cannot be written to; name another")
    if path.exists() and not is_of(tool, path):
        raise UsageError(f"--json {path} exists and is no record of `hvd-train bench {tool}`; name another file")


def write(path: Path, record: Record) -> None:
    """Write the record, whole or not at all. Raises UsageError where it cannot be written."""
    try:
        durable.write_text(path, json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def is_of(tool: str, path: Path) -> bool:
    """Return whether a file is a record of this tool."""
    try:
        record = json.loads(plain_file.read_text(path))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(record, dict) and record.get("bench") == tool


def _gpus() -> list[str]:
    """Return the names of this host's GPUs, from the driver's own program: torch would make a context on each."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
