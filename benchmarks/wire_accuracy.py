"""Gradients as fp16 against fp32: the top-1 that the digits recipe reaches on two ranks.

    python -m benchmarks.wire_accuracy --json benchmarks/records/wire-accuracy.json       about 3 minutes on 2 cores

The recipe is trained unchanged, for all its epochs, once with each format of gradients for each seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.record import about, interval, show
from benchmarks.speed import ENVIRONMENT, LAUNCHERS

WIRES = {"fp32": "none", "fp16": "fp16"}


def top1(compression: str, seed: int) -> float:
    """Train once and return the top-1 of the last epoch on the held-out images."""
    with tempfile.TemporaryDirectory(prefix="wire-") as folder:
        line = f"train digits --global-batch-size 64 --batch-size 32 --device cpu --compression {compression} "
        line += f"--seed {seed} --output-dir run"
        command = [*LAUNCHERS["gloo"], "hvd-train", *line.split()]
        subprocess.run(command, cwd=folder, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
        score: float = json.loads((Path(folder) / "run/summary.json").read_text())["top1"]
    return score


def main() -> None:
    """Measure, print and, if asked to, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=7, help="how many seeds, from 0 on (default: 7)")
    parser.add_argument("--json", type=Path, help="the file that takes the record")
    options = parser.parse_args()
    scores = {wire: [top1(compression, seed) for seed in range(options.seeds)] for wire, compression in WIRES.items()}
    differences = [half - full for full, half in zip(scores["fp32"], scores["fp16"], strict=True)]
    low, high = interval(differences)
    facts = {
        "top1_of_seeds": scores,
        "difference": statistics.median(differences),
        "interval": [low, high],
        "aim": "equal",
        "verdict": "met" if low <= 0 <= high else "not met",
    }
    show({**about("benchmarks.wire_accuracy", sys.argv[1:]), **facts}, options.json)


if __name__ == "__main__":
    main()
