"""How much longer a step of ours takes than one of a bare Horovod loop: microseconds, for the digits recipe's network.

    python -m benchmarks.own_cost --json benchmarks/records/own-cost.json       about 3 minutes on 2 cores

One process of one rank holds both: before every epoch our training waits while the loop of `benchmarks.bare` trains a
network of the same kind for an epoch. So both have the same threads and the same memory. Two processes do not: there
the difference of the same two programs moves by 150 microseconds from start to start. The time of ours includes
journal, TensorBoard and the end of an epoch. One more start tells how long the parts of our step take.
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
from benchmarks.record import about, at_most, interval, show
from benchmarks.speed import ENVIRONMENT, ours
from hvd_train import loop, step
from hvd_train.data import batches
from hvd_train.network.models import digits_convnet

BATCH, IMAGE_SIZE, STEPS = 30, 8, 48  # of an epoch of 1,437 images
WARM_UP = 3  # epochs of each loop
MOST = 300  # microseconds
FILE, PROFILE = "OWN_COST", "OWN_COST_PROFILE"  # environment: the file for the times; whether PARTS are timed
PARTS = {
    "the next batch": (batches.Ahead, "prepare"),
    "losses and hits": (step, "sums_of"),
    "the gradient's norm": (step.Step, "_clip"),
    "the sums over the ranks": (step, "_read"),
    "random numbers of the step": (step, "seed"),
    "console, metrics.jsonl, TensorBoard": (loop, "take_down"),
    "the end of an epoch": (loop, "finish_epoch"),
}
"""The parts of a step of ours beside passes and update, and the function that does each."""


def alternating(num_classes: int) -> nn.Module:
    """Return the recipe's network for `hvd-train train --model`; before each epoch it lets the bare loop train one."""
    model = digits_convnet(num_classes)
    model.register_forward_pre_hook(Turns(digits_convnet(num_classes)))
    return model


@dataclass
class Turns:
    """A hook before each forward pass of our training, which lets the bare loop have its turn and times both."""

    other: nn.Module
    """The network of the bare loop."""
    passes: int = 0
    started: float = 0.0
    microseconds: dict[str, list[float]] = field(default_factory=lambda: {"ours": [], "bare": []})
    """Time per step of each loop, epoch by epoch."""
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """Seconds that each part has taken in all steps, where PROFILE is set."""

    def __post_init__(self) -> None:
        if PROFILE in os.environ:
            for part, (owner, name) in PARTS.items():
                setattr(owner, name, self._timed(part, getattr(owner, name)))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.parts[part] += time.perf_counter() - started

        return timed

    def __call__(self, model: nn.Module, *_: Any) -> None:
        """Take an epoch of the bare loop where an epoch of ours is about to begin, and write the times so far."""
        if not model.training:
            return
        if self.passes % STEPS == 0:
            ended = time.perf_counter()
            if self.passes == 0:
                self.steps = bare.horovod(self.other, IMAGE_SIZE, BATCH)
            else:
                self._record("ours", ended - self.started)
            bare_started = time.perf_counter()
            for _ in range(STEPS):
                next(self.steps)
            self._record("bare", time.perf_counter() - bare_started)
            parts = {part: seconds / max(1, self.passes) * 1e6 for part, seconds in self.parts.items()}
            Path(os.environ[FILE]).write_text(json.dumps({**self.microseconds, "parts": parts}))
            self.started = time.perf_counter()
        self.passes += 1

    def _record(self, loop_name: str, seconds: float) -> None:
        self.microseconds[loop_name].append(seconds / STEPS * 1e6)


def run(epochs: int, **environment: str) -> dict[str, Any]:
    """Start one process and return the times that it has measured."""
    with tempfile.TemporaryDirectory(prefix="own-cost-") as folder:
        times = Path(folder) / "times.json"
        command = ours("benchmarks.own_cost:alternating", BATCH, "one rank", ranks=1, epochs=WARM_UP + epochs)
        variables = {**ENVIRONMENT, FILE: str(times), **environment}
        subprocess.run(command, cwd=folder, env=variables, check=True, stdout=subprocess.DEVNULL)
        measured: dict[str, Any] = json.loads(times.read_text())
        return measured


def one_start(epochs: int) -> dict[str, float]:
    """Return the median microseconds of a step of each loop, and of the difference between neighbouring epochs."""
    measured = run(epochs)
    # The bare loop goes first, so its times are one more: our last epoch ends without another turn to measure it.
    both = list(zip(measured["ours"], measured["bare"], strict=False))[WARM_UP:]
    ours_median, bare_median = (statistics.median(times) for times in zip(*both, strict=True))
    return {"ours": ours_median, "bare": bare_median, "difference": statistics.median(a - b for a, b in both)}


def main() -> None:
    """Measure, print and, if asked to, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=60, help="epochs of each loop in each start (default: 60)")
    parser.add_argument("--json", type=Path, help="the file that takes the record")
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
    show(record, options.json)


if __name__ == "__main__":
    main()
