"""Our loop beside the programs that users would write without us: ratios of images per second on 2 ranks.

    python -m benchmarks.speed               all comparisons, about 25 minutes on 2 cores
    python -m benchmarks.speed --quick       each started once, about 2 minutes

A comparison is two running trainings that take turns (`benchmarks.turns`), with the same network, batch and number of
threads, without augmentation, evaluation or commits. Both are started several times: turns within a start agree with
each other, but another start of the same two programs moves the ratio of their steps by 6% (their memory lies and their
threads run elsewhere), which is more than the difference to be measured. The record goes to
benchmarks/records/speed.json.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import RECORDS, about, at_least, show
from benchmarks.turns import compare, over_starts, started

ROOT = Path(__file__).parents[1]
PROGRAMS = Path(sys.executable).parent
ENVIRONMENT = {**os.environ, "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
AS_ROOT = ["--allow-run-as-root"] if os.geteuid() == 0 else []
LAUNCHERS = {
    "gloo": ["horovodrun", "--gloo", "-np", "2"],
    "mpi": ["mpirun", *AS_ROOT, "--oversubscribe", "--bind-to", "none", "-np", "2"],
    "torchrun": ["torchrun", "--standalone", "--nproc-per-node", "2"],
    "one rank": ["horovodrun", "--gloo", "-np", "1"],
}
RANKS = 2
BATCHES = {"convnet": 30, "resnet18": 30}  # per rank, so that no rank is idle in the last step of an epoch


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


def ours(model: str, batch: int, launcher: str, *, ranks: int = RANKS, epochs: int = 1_000_000) -> list[str]:
    """Return the command that trains `model`, a `module:function`, with our loop and `batch` images on each rank."""
    line = f"train --data digits --model {model} --global-batch-size {ranks * batch} "
    line += f"--batch-size {batch} --augment none --device cpu --epochs {epochs} --eval-epochs 1000000 "
    line += "--log-steps 100 --output-dir run --commit-seconds 1000000 --learning-rate 0.02 --weight-decay 0"
    return [*LAUNCHERS[launcher], "hvd-train", *line.split()]


def _ours(comparison: Comparison) -> list[str]:
    """Return the command of our side of a comparison."""
    size = [] if comparison.network == "convnet" else ["--image-size", "32"]
    command = ours(f"benchmarks.networks:{comparison.network}", BATCHES[comparison.network], comparison.ours)
    return [*command, *size]


def other(comparison: Comparison) -> list[str]:
    """Return the command of the other side of a comparison."""
    python = [] if comparison.other_launcher == "torchrun" else ["python"]
    program = ["-m", "benchmarks.bare", comparison.other, comparison.network, str(BATCHES[comparison.network])]
    return [*LAUNCHERS[comparison.other_launcher], *python, *program]


def measure(comparison: Comparison, starts: int, turns: int, seconds: float) -> dict[str, Any]:
    """Start both sides `starts` times, each time for `turns` turns of about `seconds`, and return the result."""
    results = [_one_start(comparison, turns, seconds, ours_first=bool(start % 2)) for start in range(starts)]
    summary = over_starts(results)
    times = dict(zip(("other", "ours"), summary["seconds_per_step"], strict=True))
    shown = {
        **summary,
        "seconds_per_step": times,
        "aim": f"at least {comparison.aim}",
        "verdict": at_least(comparison.aim, summary["interval"]),
    }
    print(
        f"{comparison.name}: {shown['median']} ({shown['interval'][0]} to {shown['interval'][1]}), {shown['aim']}: "
        f"{shown['verdict']}; {times['ours'] * 1000:.1f} and {times['other'] * 1000:.1f} ms a step",
        flush=True,
    )
    return {"comparison": comparison.name, **shown}


def _one_start(comparison: Comparison, turns: int, seconds: float, *, ours_first: bool) -> dict[str, Any]:
    """Start both sides once and return what `benchmarks.turns.compare` measures, the other side over ours."""
    commands = {"ours": _ours(comparison), "other": other(comparison)}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="speed-")))
        programs = {
            name: stack.enter_context(started(command, folder / name, RANKS, ENVIRONMENT))
            for name, command in sorted(commands.items(), reverse=ours_first)
        }
        programs["ours"].turn(5)
        steps = max(3, round(seconds / programs["ours"].turn(5)))
        return compare(programs["other"], programs["ours"], turns=turns, steps=steps, warm_up=1)


def main() -> None:
    """Measure and, if all comparisons were made in full, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="start each pair once, and write no record")
    parser.add_argument("--starts", type=int, default=8, help="starts of each pair of programs (default: 8)")
    parser.add_argument("--turns", type=int, default=5, help="turns of each program in each start (default: 5)")
    parser.add_argument("--only", default="", help="only comparisons whose name contains this; write no record")
    options = parser.parse_args()
    starts, turns, seconds = (1, 3, 0.3) if options.quick else (options.starts, options.turns, 1.0)
    chosen = [comparison for comparison in COMPARISONS if options.only in comparison.name]
    comparisons = [
        measure(comparison, starts if options.quick else starts * comparison.times_starts, turns, seconds)
        for comparison in chosen
    ]
    record = {**about("benchmarks.speed", sys.argv[1:]), "comparisons": comparisons}
    if not options.only and not options.quick:
        show(record, RECORDS / "speed.json")


if __name__ == "__main__":
    main()
