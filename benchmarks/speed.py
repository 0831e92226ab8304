"""Our loop over the programs that users would write without us: ratios of images per second on 2 ranks.

    python -m benchmarks.speed               all comparisons, about 25 minutes on 2 cores
    python -m benchmarks.speed --quick       each started once, about 2 minutes; no record

A comparison is two running trainings that take turns (`benchmarks.turns`), with the same network, batch and number of
threads, without augmentation, evaluation or commits. The record is benchmarks/records/speed.json.
"""

import argparse
from dataclasses import dataclass
from typing import Any

from benchmarks.turns import LAUNCHERS, compare, summary, write

BATCH = 30  # per rank, so that no rank is idle in the last step of an epoch


@dataclass(frozen=True)
class Comparison:
    """Our loop under one launcher against another program under a launcher of its own."""

    network: str
    ours: str
    other: str
    other_launcher: str
    aim: float
    """The least ratio of images per second, ours over the other's."""
    times_starts: int = 1
    """By how much the number of starts is multiplied: a ratio close to its aim needs more."""

    @property
    def name(self) -> str:
        """The name of the comparison in docs/benchmarks.md."""
        return f"{self.network}: ours ({self.ours}) over {self.other} ({self.other_launcher})"


COMPARISONS = [
    *(Comparison("convnet", launcher, "horovod", launcher, 0.98, times_starts=2) for launcher in ("gloo", "mpi")),
    *(Comparison("resnet18", launcher, "horovod", launcher, 0.98) for launcher in ("gloo", "mpi")),
    *(Comparison("resnet18", launcher, "ddp", "torchrun", 1.0) for launcher in ("gloo", "mpi")),
    Comparison("convnet", "gloo", "example", "gloo", 1.3),
]


def ours(model: str, launcher: list[str], more: str = "--epochs 1000000 --commit-seconds 1000000") -> list[str]:
    """Return the command that trains a model with our loop, without evaluations."""
    line = f"hvd-train train --data digits --model {model} --batch-size {BATCH} --augment none --device cpu "
    line += f"--eval-epochs 1000000 --output-dir run --learning-rate 0.02 --weight-decay 0 {more}"
    return [*launcher, *line.split(), *(["--image-size", "32"] if "resnet" in model else [])]


def other(comparison: Comparison) -> list[str]:
    """Return the command of the other side of a comparison."""
    python = [] if comparison.other_launcher == "torchrun" else ["python"]
    program = ["-m", "benchmarks.bare", comparison.other, comparison.network, str(BATCH)]
    return [*LAUNCHERS[comparison.other_launcher], *python, *program]


def measure(comparison: Comparison, starts: int, turns: int, seconds: float) -> dict[str, Any]:
    """Return the ratio of images per second; for `starts`, `turns` and `seconds` see `turns.compare`."""
    mine = ours(f"benchmarks.bare:{comparison.network}", LAUNCHERS[comparison.ours])
    ratios, facts = compare({"other": other(comparison), "ours": mine}, starts, turns, seconds)
    return {**summary(comparison.name, ratios, "at least", comparison.aim), **facts}


def main() -> None:
    """Measure and, if all comparisons are made in full, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="start each pair once, and write no record")
    parser.add_argument("--starts", type=int, default=8, help="starts of each pair of programs (default: 8)")
    parser.add_argument("--turns", type=int, default=5, help="turns of each program in each start (default: 5)")
    parser.add_argument("--only", default="", help="only comparisons whose name contains this; write no record")
    options = parser.parse_args()
    comparisons = []
    for one in COMPARISONS:
        if options.only in one.name:
            full = (options.starts * one.times_starts, options.turns, 1.0)
            comparisons.append(measure(one, *((1, 3, 0.3) if options.quick else full)))
    if not options.only and not options.quick:
        write("speed", "benchmarks.speed", {"comparisons": comparisons})


if __name__ == "__main__":
    main()
