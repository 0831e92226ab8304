"""The cost of being ready for faults while none happens: commits at the default cadence, and an elastic world.

    python -m benchmarks.ready commits       about 3 minutes on 2 cores
    python -m benchmarks.ready elastic       about 20 minutes
    ... --quick                              half a minute each; no record

ResNet-50 (23.5 million parameters with 10 classes), SGD with momentum, 2 ranks, 32 images of 32 pixels a step. The
cost of a commit is the time by which the ten steps after it take longer than the next ten; the default cadence has one
commit a minute.
Elastic against static: the same training in turns (`benchmarks.turns`), with steps of 50 ms that leave the cores free,
as those on a GPU do, and with that ResNet-50, which keeps all cores busy. The records go to
benchmarks/records/ready-*.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.record import RECORDS, about, at_most, show
from benchmarks.turns import compare, over_starts, started
from hvd_train.settings.run import RunConfig

ROOT = Path(__file__).parents[1]
PROGRAMS = Path(sys.executable).parent
COMMIT_STEPS = 20
NETWORKS = {"waiting": 10, "resnet50": 3}  # of benchmarks.networks, and the steps of a turn, which last about a second
AIM = 1.01
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
}
LAUNCHERS = {
    "static": [str(PROGRAMS / "horovodrun"), "--gloo", "-np", "2", str(PROGRAMS / "hvd-train"), "train"],
    "elastic": [str(ROOT / "horovodrun_scripts/train_elastic.sh"), "-np", "2", "--"],
}


def training(model: str, epochs: int) -> list[str]:
    """Return the arguments of `hvd-train train` for a training that makes no commit by time."""
    line = f"--data digits --model {model} --image-size 32 --global-batch-size 32 --batch-size 16 --augment none "
    line += f"--device cpu --epochs {epochs} --eval-epochs 1000 --log-steps 1 --output-dir run "
    # At this learning rate nothing diverges, however long it is trained.
    return [*line.split(), "--commit-seconds", "1000000", "--learning-rate", "0.001"]


def step_times(steps: int, commit_steps: int) -> list[float]:
    """Return the seconds of each step from the second on, by the times in metrics.jsonl."""
    line = [*training("resnet50", -(-steps // 45)), "--commit-steps", str(commit_steps)]
    with tempfile.TemporaryDirectory(prefix="ready-") as folder:
        subprocess.run([*LAUNCHERS["static"], *line], cwd=folder, env=ENVIRONMENT, check=True)
        lines = map(json.loads, (Path(folder) / "run/metrics.jsonl").read_text().splitlines())
        times = [record["time"] for record in lines if record["kind"] == "step"]
    return [after - before for before, after in pairwise(times)]


def commit_cost(steps: int, every: int) -> list[float]:
    """Return the seconds that each commit has cost, in a run of `steps` steps with a commit after every `every`."""
    times = step_times(steps, every)
    half = every // 2
    costs = []
    for commit in range(every, len(times) - every, every):
        after = times[commit - 1 : commit - 1 + every]  # times[n] is the time of step n + 2
        costs.append(sum(after[:half]) - half * statistics.median(after[half:]))
    return costs


def measure_commits(steps: int, every: int) -> dict[str, Any]:
    """Return the cost of a commit, and its share of the time at the default cadence."""
    cadence = RunConfig().commit_seconds
    assert cadence is not None
    costs = commit_cost(steps, every)
    cost = statistics.median(costs)
    print(f"a commit costs {cost:.3f} s (median of {len(costs)}): {cost / cadence:.2%} of the time at one a minute")
    return {
        "seconds_per_commit": [round(cost, 3) for cost in costs],
        "commit_every_seconds": cadence,
        "commit_share_of_time": round(cost / cadence, 5),
    }


def measure_elastic(networks: Mapping[str, int], starts: int, turns: int, warm_up: int = 3) -> dict[str, Any]:
    """Return the seconds per step of an elastic world over those of a static one.

    `networks` gives the steps of a turn for each network; both worlds are started `starts` times and take `turns` turns
    in each start.
    """
    measured = {}
    for network, steps in networks.items():
        results = [
            _one_start(network, steps, turns, warm_up, static_first=bool(number % 2)) for number in range(starts)
        ]
        summary = over_starts(results)
        low, high = summary["interval"]
        measured[network] = {**summary, "aim": f"at most {AIM}", "verdict": at_most(AIM, (low, high))}
        print(
            f"{network}: elastic over static {summary['median']} ({low} to {high}), {measured[network]['verdict']}",
            flush=True,
        )
    return {"elastic_over_static": measured}


def _one_start(network: str, steps: int, turns: int, warm_up: int, *, static_first: bool) -> dict[str, Any]:
    """Start both worlds once and return what `benchmarks.turns.compare` measures, elastic over static."""
    line = training(f"benchmarks.networks:{network}", 100_000)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ready-")))
        programs = {
            name: stack.enter_context(started([*LAUNCHERS[name], *line], folder / name, 2, ENVIRONMENT))
            for name in sorted(LAUNCHERS, reverse=static_first)
        }
        return compare(programs["elastic"], programs["static"], turns=turns, steps=steps, warm_up=warm_up)


def main() -> None:
    """Measure and, unless --quick is given, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=["commits", "elastic"])
    parser.add_argument("--steps", type=int, default=320, help="steps of the run with commits (default: 320)")
    parser.add_argument("--starts", type=int, default=8, help="starts of each of the two trainings (default: 8)")
    parser.add_argument("--turns", type=int, default=25, help="turns of each training in each start (default: 25)")
    parser.add_argument("--quick", action="store_true", help="take a few steps and write no record")
    options = parser.parse_args()
    if options.subject == "commits":
        steps, every = (45, 14) if options.quick else (options.steps, COMMIT_STEPS)
        measured = measure_commits(steps, every)
    elif options.quick:
        measured = measure_elastic({"waiting": 20}, starts=1, turns=3, warm_up=1)
    else:
        measured = measure_elastic(NETWORKS, options.starts, options.turns)
    if not options.quick:
        record = {**about("benchmarks.ready", sys.argv[1:]), **measured}
        show(record, RECORDS / f"ready-{options.subject}.json")


if __name__ == "__main__":
    main()
