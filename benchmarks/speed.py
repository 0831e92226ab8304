"""How fast our loop is, and what it costs to be ready for faults: ratios of the times of programs that take turns.

    python -m benchmarks.speed training      over the programs of `benchmarks.bare`; about 25 minutes on 2 cores
    python -m benchmarks.speed elastic       an elastic job over a static one; about 20 minutes
    python -m benchmarks.speed commits       what a commit a minute costs; about 3 minutes
    ... --quick                              half a minute to two minutes each; no record

Two running trainings take turns (`benchmarks.turns`), with the same network, batch and number of threads, without
augmentation, evaluation or commits. Elastic and static jobs train a ResNet-50, and a network whose steps of 50 ms leave
the cores free, as steps on a GPU do. A commit costs the time by which the ten steps after it take longer than the next
ten, in a training of ResNet-50 that keeps both cores busy. Records are in benchmarks/records.
"""

import json
import statistics
import subprocess
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.turns import ENVIRONMENT, LAUNCHERS, ROOT, compare, main, summary

BATCH = 30  # per rank, so that no rank is idle in the last step of an epoch
# Network, our launcher, the other program and its launcher, the least ratio of images per second, and the number of
# starts: a ratio close to its aim needs more.
COMPARISONS = [
    *(("convnet", launcher, "horovod", launcher, 0.98, 16) for launcher in ("gloo", "mpi")),
    *(("resnet18", launcher, "horovod", launcher, 0.98, 8) for launcher in ("gloo", "mpi")),
    *(("resnet18", launcher, "ddp", "torchrun", 1.0, 8) for launcher in ("gloo", "mpi")),
]
ELASTIC = [str(ROOT / "horovodrun_scripts" / "train_elastic.sh"), "-np", "2", "--"]
ONE_THREAD = {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}


def ours(model: str, more: str = "--epochs 1000000 --commit-seconds 1000000") -> list[str]:
    """Return the command that trains a model with our loop, without evaluations."""
    line = f"hvd-train train --data digits --model {model} --batch-size {BATCH} --augment none "
    line += f"--device cpu --eval-epochs 1000000 --output-dir run --learning-rate 0.02 --weight-decay 0 {more}"
    return [*line.split(), *(["--image-size", "32"] if "resnet" in model else [])]


def training(quick: bool) -> list[dict[str, Any]]:
    """Return the ratios of our images per second and those of other programs."""
    found = []
    for network, launcher, other, its_launcher, aim, starts in COMPARISONS:
        python = [] if its_launcher == "torchrun" else ["python"]
        theirs = [*LAUNCHERS[its_launcher], *python, "-m", "benchmarks.bare", other, network, str(BATCH)]
        commands = {"other": theirs, "ours": [*LAUNCHERS[launcher], *ours(f"benchmarks.bare:{network}")]}
        ratios, facts = compare(commands, *((1, 3, 0.3) if quick else (starts, 5, 1.0)))
        name = f"{network}: ours ({launcher}) over {other} ({its_launcher})"
        found.append({**summary(name, ratios, "at least", aim), **facts})
    return found


def elastic(quick: bool) -> list[dict[str, Any]]:
    """Return how many times as long a step of an elastic job takes as one of a static job."""
    found = []
    for network in ["waiting"] if quick else ["waiting", "resnet50"]:
        line = ours(f"benchmarks.bare:{network}")
        commands = {"elastic": [*ELASTIC, *line[2:]], "static": [*LAUNCHERS["gloo"], *line]}
        values, facts = compare(commands, *((1, 3, 1.0) if quick else (8, 25, 1.0)), variables=ONE_THREAD)
        found.append({**summary(f"{network}: elastic over static", values, "at most", 1.01), **facts})
    return found


def commits(quick: bool) -> list[dict[str, Any]]:
    """Return the share of the time that one commit a minute takes, which is the default."""
    epochs, every = (2, 14) if quick else (14, 20)
    more = f"--epochs {epochs} --log-steps 1 --commit-steps {every} --commit-seconds 1000000"
    with tempfile.TemporaryDirectory(prefix="commits-") as folder:
        command = [*LAUNCHERS["gloo"], *ours("resnet50", more)]
        subprocess.run(command, cwd=folder, env=ONE_THREAD, check=True, stdout=subprocess.DEVNULL)
        lines = map(json.loads, (Path(folder) / "run/metrics.jsonl").read_text().splitlines())
        steps = [line["time"] for line in lines if line["kind"] == "step"]
    times, costs, half = [after - before for before, after in pairwise(steps)], [], every // 2
    for commit in range(every, len(times) - every, every):
        after = times[commit - 1 : commit - 1 + every]  # times[n] is the time of step n + 2
        costs.append(sum(after[:half]) - half * statistics.median(after[half:]))
    found = summary("a commit a minute, share of the time", [cost / 60 for cost in costs], "at most", 0.01)
    return [{**found, "seconds_per_commit": [round(cost, 3) for cost in costs]}]


if __name__ == "__main__":
    main(__doc__, "benchmarks.speed", {"training": training, "elastic": elastic, "commits": commits})
