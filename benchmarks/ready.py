"""The cost of being ready for faults while none happens.

    python -m benchmarks.ready commits       what a commit costs; about 3 minutes on 2 cores
    python -m benchmarks.ready elastic       an elastic job over a static one, in turns; about 20 minutes
    ... --quick                              half a minute each; no record

A commit costs the time by which the ten steps after it take longer than the next ten, in a training of ResNet-50 that
keeps both cores busy; the default is one commit a minute. Elastic and static jobs train that ResNet-50, and a network
whose steps of 50 ms leave the cores free, as steps on a GPU do. The records are benchmarks/records/ready-*.json.
"""

import json
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.speed import ours
from benchmarks.turns import ENVIRONMENT, LAUNCHERS, ROOT, compare, parser, summary, write
from hvd_train.config import RunConfig

ELASTIC = [str(ROOT / "horovodrun_scripts" / "train_elastic.sh"), "-np", "2", "--"]
ONE_THREAD = {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}


def steps_of(command: Sequence[str]) -> list[float]:
    """Run a training and return the time of each step, in seconds since 1970."""
    with tempfile.TemporaryDirectory(prefix="ready-") as folder:
        subprocess.run(command, cwd=folder, env=ONE_THREAD, check=True, stdout=subprocess.DEVNULL)
        lines = map(json.loads, (Path(folder) / "run/metrics.jsonl").read_text().splitlines())
        return [line["time"] for line in lines if line["kind"] == "step"]


def commits(*, quick: bool) -> list[dict[str, Any]]:
    """Return the share of the time that commits take at the default of one a minute."""
    epochs, every = (2, 14) if quick else (14, 20)
    more = f"--epochs {epochs} --log-steps 1 --commit-steps {every} --commit-seconds 1000000"
    times = [after - before for before, after in pairwise(steps_of(ours("resnet50", LAUNCHERS["gloo"], more)))]
    costs, half = [], every // 2
    for commit in range(every, len(times) - every, every):
        after = times[commit - 1 : commit - 1 + every]  # times[n] is the time of step n + 2
        costs.append(sum(after[:half]) - half * statistics.median(after[half:]))
    cadence = RunConfig().commit_seconds
    assert cadence is not None
    shares = [cost / cadence for cost in costs]
    found = summary("a commit a minute, share of the time", shares, "at most", 0.01)
    return [{**found, "seconds_per_commit": [round(cost, 3) for cost in costs]}]


def elastic(*, quick: bool) -> list[dict[str, Any]]:
    """Return how many times as long a step of an elastic job takes as one of a static job."""
    found = []
    for network in ["waiting"] if quick else ["waiting", "resnet50"]:
        line = ours(f"benchmarks.bare:{network}", [])
        commands = {"elastic": [*ELASTIC, *line[2:]], "static": [*LAUNCHERS["gloo"], *line]}
        values, facts = compare(commands, *((1, 3, 1.0) if quick else (8, 25, 1.0)), variables=ONE_THREAD)
        found.append({**summary(f"{network}: elastic over static", values, "at most", 1.01), **facts})
    return found


def main() -> None:
    """Measure and, unless --quick is given, write the record."""
    line, subjects = parser(__doc__), {"commits": commits, "elastic": elastic}
    line.add_argument("subject", choices=subjects)
    options = line.parse_args()
    comparisons = subjects[options.subject](quick=options.quick)
    if not options.quick:
        write(f"ready-{options.subject}", "benchmarks.ready", {"comparisons": comparisons})


if __name__ == "__main__":
    main()
