"""What a step of ours takes beyond one of a bare Horovod loop: microseconds, of the digits recipe's small network.

    python -m benchmarks.own_cost --json benchmarks/records/own-cost.json       about 3 minutes on 2 cores

One rank, whose process has both: our training of one network stands still before every other epoch, while the loop of
`benchmarks.bare` has an epoch with another one of its kind. So both have the same threads and the same memory, which
two processes do not: there the difference of the same two programs moves by 150 microseconds from start to start.
Journal, TensorBoard and the end of an epoch are in ours. One more start tells how long its parts take.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import bare
from benchmarks.record import about, at_most
from benchmarks.speed import ENVIRONMENT, ours
from hvd_train import loop, step
from hvd_train.bench.tune import interval
from hvd_train.data import batches
from hvd_train.network.models import digits_convnet

BATCH, IMAGE_SIZE, STEPS = 30, 8, 48  # of an epoch of 1,437 images
WARM_UP = 3  # epochs of each
MOST = 300
FILE, PROFILE = "OWN_COST", "OWN_COST_PROFILE"  # in the environment: where the process writes; whether it takes PARTS
PARTS = {
    "the next batch": (batches.Ahead, "prepare"),
    "losses and hits": (step, "sums_of"),
    "the gradient's norm": (step.Step, "_clip"),
    "the sums over the ranks": (step, "_read"),
    "random numbers of the step": (step, "seed"),
    "console, metrics.jsonl, TensorBoard": (loop, "take_down"),
    "the end of an epoch": (loop, "finish_epoch"),
}
"""Of a step of ours, beside passes and update, by the functions that do it."""


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
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """Seconds of all steps, where they are taken."""

    def __post_init__(self) -> None:
        if PROFILE in os.environ:
            for part, (owner, name) in PARTS.items():
                setattr(owner, name, self._timed(part, getattr(owner, name)))

    def _timed(self, part: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            try:
                return plain(*arguments, **named)
            finally:
                self.parts[part] += time.perf_counter() - begun

        return timed

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
            parts = {part: seconds / max(1, self.passes) * 1e6 for part, seconds in self.parts.items()}
            Path(os.environ[FILE]).write_text(json.dumps({**self.microseconds, "parts": parts}))
            self.began = time.perf_counter()
        self.passes += 1

    def _took(self, who: str, seconds: float) -> None:
        self.microseconds[who].append(seconds / STEPS * 1e6)


def run(epochs: int, **environment: str) -> dict[str, Any]:
    """What a process has measured."""
    with tempfile.TemporaryDirectory(prefix="own-cost-") as folder:
        said = Path(folder) / "said"
        command = ours("benchmarks.own_cost:alternating", BATCH, "one rank", ranks=1, epochs=WARM_UP + epochs)
        variables = {**ENVIRONMENT, FILE: str(said), **environment}
        subprocess.run(command, cwd=folder, env=variables, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(said.read_text())
        return found


def one_start(epochs: int) -> dict[str, float]:
    """Median microseconds of a step of each, and of the difference of neighbouring epochs."""
    found = run(epochs)
    # The bare loop goes first. What ours had after the last of its turns is not measured.
    both = list(zip(found["ours"], found["bare"], strict=False))[WARM_UP:]
    mine, other = (statistics.median(times) for times in zip(*both, strict=True))
    return {"ours": mine, "bare": other, "difference": statistics.median(a - b for a, b in both)}


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
    parts = run(options.epochs, **{PROFILE: "1"})["parts"]
    record = {
        **about("benchmarks.own_cost", sys.argv[1:]),
        "threads": torch.get_num_threads(),
        "microseconds_of_starts": [{name: round(value) for name, value in start.items()} for start in starts],
        "microseconds_of_parts": {part: round(microseconds) for part, microseconds in parts.items()},
        "microseconds beyond the bare loop": {
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
