"""What a step of ours takes beyond one of a bare Horovod loop: microseconds, of the digits recipe's small network.

    python -m benchmarks.own_cost --json benchmarks/records/own-cost.json       about 3 minutes on 2 cores

One rank, whose process has both: our training of one network stands still before every other epoch, while the loop of
`benchmarks.bare` has an epoch with another one of its kind. So both have the same threads and the same memory, which
two processes do not: there the difference of the same two programs moves by 150 microseconds from start to start.
Journal, TensorBoard and the end of an epoch are in ours.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import bare
from benchmarks.record import about, at_most
from benchmarks.speed import ENVIRONMENT, ours
from hvd_train.models import digits_convnet
from hvd_train.tune import interval

BATCH, IMAGE_SIZE, STEPS = 30, 8, 48  # of an epoch of 1,437 images
WARM_UP = 3  # epochs of each
MOST = 300
FILE = "OWN_COST"  # in the environment: where the process writes what it has measured


def alternating(num_classes: int) -> nn.Module:
    """For `hvd-train train --model`: the recipe's network, which lets the bare loop have every other epoch."""
    model = digits_convnet(num_classes)
    model.register_forward_pre_hook(Turns(digits_convnet(num_classes)))
    return model


@dataclass
class Turns:
    """Called before each forward pass of our training."""

    other: nn.Module
    """The bare loop's network."""
    passes: int = 0
    began: float = 0.0
    microseconds: dict[str, list[float]] = field(default_factory=lambda: {"ours": [], "bare": []})
    """Per step, epoch by epoch."""

    def __call__(self, model: nn.Module, *_: Any) -> None:
        """After an epoch of ours, one of the other."""
        if not model.training:
            return
        if self.passes % STEPS == 0:
            ended = time.perf_counter()
            if self.passes == 0:
                self.steps = bare.horovod(self.other, IMAGE_SIZE, BATCH)
            else:
                self._took("ours", ended - self.began)
            begun = time.perf_counter()
            for _ in range(STEPS):
                next(self.steps)
            self.began = time.perf_counter()
            self._took("bare", self.began - begun)
            Path(os.environ[FILE]).write_text(json.dumps(self.microseconds))
            self.began = time.perf_counter()
        self.passes += 1

    def _took(self, who: str, seconds: float) -> None:
        self.microseconds[who].append(seconds / STEPS * 1e6)


def one_start(epochs: int) -> dict[str, float]:
    """Median microseconds of a step of each, and of the difference of neighbouring epochs."""
    with tempfile.TemporaryDirectory(prefix="own-cost-") as folder:
        said = Path(folder) / "said"
        command = ours("benchmarks.own_cost:alternating", BATCH, "one rank", ranks=1, epochs=WARM_UP + epochs)
        environment = {**ENVIRONMENT, FILE: str(said)}
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        found = json.loads(said.read_text())
    # The bare loop goes first, and once more than ours has come to an end before it.
    both = list(zip(found["ours"], found["bare"], strict=False))[WARM_UP:]
    mine, bare = (statistics.median(times) for times in zip(*both, strict=True))
    return {"ours": mine, "bare": bare, "difference": statistics.median(a - b for a, b in both)}


def main() -> None:
    """Measure, print, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=60, help="of each loop in each start (default: 60)")
    parser.add_argument("--json", type=Path, help="where the record goes")
    options = parser.parse_args()
    starts = [one_start(options.epochs) for _ in range(options.starts)]
    differences = [start["difference"] for start in starts]
    low, high = interval(differences) if len(starts) > 1 else (differences[0], differences[0])
    record = {
        **about("benchmarks.own_cost", sys.argv[1:]),
        "threads": torch.get_num_threads(),
        "microseconds_of_starts": [{name: round(value) for name, value in start.items()} for start in starts],
        "own_cost": {
            "median": round(statistics.median(differences)),
            "interval": [round(low), round(high)],
            "aim": f"at most {MOST}",
            "verdict": at_most(MOST, (low, high)),
        },
    }
    text = json.dumps(record, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
