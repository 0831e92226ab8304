"""fp16 on the wire against fp32: what the digits recipe comes to on two ranks.

    python -m benchmarks.wire_accuracy --json benchmarks/records/wire-accuracy.json       about 3 minutes on 2 cores

The recipe as it is, all its epochs, once with each kind of gradients on the wire for each of the seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.record import about
from benchmarks.speed import ENVIRONMENT, LAUNCHERS
from hvd_train.bench.tune import interval

WIRES = {"fp32": "none", "fp16": "fp16"}


def top1(compression: str, seed: int) -> float:
    """Of the last epoch, on the held-out images."""
    with tempfile.TemporaryDirectory(prefix="wire-") as folder:
        line = f"train digits --device cpu --compression {compression} --seed {seed} --output-dir run"
        command = [*LAUNCHERS["gloo"], "hvd-train", *line.split()]
        subprocess.run(command, cwd=folder, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
        found: float = json.loads((Path(folder) / "run/summary.json").read_text())["top1"]
    return found


def main() -> None:
    """Measure, print, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=7, help="so many, from 0 on (default: 7)")
    parser.add_argument("--json", type=Path, help="where the record goes")
    options = parser.parse_args()
    found = {wire: [top1(way, seed) for seed in range(options.seeds)] for wire, way in WIRES.items()}
    differences = [half - full for full, half in zip(found["fp32"], found["fp16"], strict=True)]
    low, high = interval(differences)
    facts = {
        "top1_of_seeds": found,
        "difference": statistics.median(differences),
        "interval": [low, high],
        "aim": "equal",
        "verdict": "met" if low <= 0 <= high else "not met",
    }
    text = json.dumps({**about("benchmarks.wire_accuracy", sys.argv[1:]), **facts}, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
