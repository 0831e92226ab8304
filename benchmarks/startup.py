"""How long a start takes: from `horovodrun` to the first step of 2 ranks, beside `import torch` alone.

    python -m benchmarks.startup --json benchmarks/records/startup.json       about 5 minutes on 2 cores

In turns, with files in the page cache: `import torch`, `hvd-train --help`, and the job with the digits recipe and with
torchvision's ResNet-18, whose import brings torch's compiler. The first step is the first one in metrics.jsonl. A
`horovodrun` without patch L5 imports torch, too, before it starts the ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import about, interval, show
from benchmarks.speed import ENVIRONMENT, LAUNCHERS

JOBS = {"digits": [], "resnet18": ["--model", "resnet18", "--image-size", "32"]}
AIMS = {"digits over import torch": 3.0, "help, seconds": 0.5}


def seconds_of(command: Sequence[str]) -> float:
    """Return the seconds from the start of a command to its end. Raises CalledProcessError where it fails."""
    started = time.perf_counter()
    subprocess.run(command, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def seconds_to_first_step(flags: Sequence[str]) -> float:
    """Return the seconds from the start of horovodrun to the end of the first step of its 2 ranks."""
    with tempfile.TemporaryDirectory(prefix="startup-") as folder:
        line = [*LAUNCHERS["gloo"], "hvd-train", "train", "digits", *flags, "--epochs", "1", "--log-steps", "1"]
        started = time.time()
        subprocess.run([*line, "--output-dir", "run"], cwd=folder, env=ENVIRONMENT, check=True, capture_output=True)
        lines = map(json.loads, (Path(folder) / "run/metrics.jsonl").read_text().splitlines())
        return next(float(line["time"]) for line in lines if line["kind"] == "step") - started


def measure(turns: int, *, filled: bool) -> dict[str, list[float]]:
    """Return the seconds of each program, turn by turn.

    A first turn, which fills the page cache, is not counted; where it is `filled` there is no such turn.
    """
    programs: dict[str, Callable[[], float]] = {
        "import torch": lambda: seconds_of([sys.executable, "-c", "import torch"]),
        "help": lambda: seconds_of(["hvd-train", "--help"]),
        **{name: lambda flags=flags: seconds_to_first_step(flags) for name, flags in JOBS.items()},  # type: ignore[misc]
    }
    times: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(turns if filled else turns + 1):
        for name, program in programs.items():
            seconds = program()
            if turn or filled:
                times[name].append(seconds)
    return times


def verdicts(times: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians with 95% intervals, of the times and of their ratios to `import torch` in the same turn."""
    values = {f"{name}, seconds": seconds for name, seconds in times.items()}
    for name in JOBS:
        pairs = zip(times[name], times["import torch"], strict=True)
        values[f"{name} over import torch"] = [job / alone for job, alone in pairs]
    result: dict[str, Any] = {}
    for name, numbers in values.items():
        low, high = interval(numbers)
        result[name] = {"median": round(statistics.median(numbers), 3), "interval": [round(low, 3), round(high, 3)]}
        if aim := AIMS.get(name):
            verdict = "met" if high < aim else "not met" if low >= aim else "not told apart"
            result[name] |= {"aim": f"under {aim}", "verdict": verdict}
    return result


def main() -> None:
    """Measure, print and, if asked to, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="take one turn, with a page cache that others have filled")
    parser.add_argument("--json", type=Path, help="the file that takes the record")
    options = parser.parse_args()
    turns = 1 if options.quick else options.turns
    times = measure(turns, filled=options.quick)
    record = {**about("benchmarks.startup", sys.argv[1:]), "turns": turns, **verdicts(times)}
    show(record, options.json)


if __name__ == "__main__":
    main()
