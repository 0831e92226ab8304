"""How fast our loop is, and what it costs to be ready for faults: ratios of the times of
programs that take turns.

    python -m benchmarks.speed NETWORK       over the programs of `benchmarks.bare`; about 8 minutes
                                             on 2 cores
    python -m benchmarks.speed own_cost      microseconds that a step of ours takes longer; about 1
                                             minute
    python -m benchmarks.speed elastic       an elastic job over a static one; about 20 minutes
    python -m benchmarks.speed exact         --reduction exact over the fast one; about an hour
    python -m benchmarks.speed commits       what a commit a minute costs; about 3 minutes
    ... --quick                              half a minute to two minutes each; no record

NETWORK is convnet, resnet18, resnet50, mobilenet_v3_large or vgg11. Running trainings take turns
(`benchmarks.turns`), with the same network, batch and number of threads, without augmentation,
evaluation or commits. Elastic and static jobs train a ResNet-50, and a network whose steps of 50 ms
leave the cores free, as steps on a GPU do. A commit costs the time by which the ten steps after it
take longer than the next ten, in a training of ResNet-50 that keeps both cores busy. Records are in
benchmarks/records.
"""

import statistics
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.bare import CHANNELS_LAST, IMAGE_SIZES
from benchmarks.turns import ENVIRONMENT, LAUNCHERS, ROOT, compare, main, summary
from tests.support.launching import output_of, records

BATCH = 30  # per rank, so that no rank is idle in the last step of an epoch
# The least time of another program's step over our time; 1 / 1.08 = 0.926.
AIMS = {"horovod": 1.1, "ddp": 1.1, "alone": 0.926}
ELASTIC = [str(ROOT / "horovodrun_scripts" / "train_elastic.sh"), "-np", "2", "--"]
ONE_THREAD = {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}


def ours(
    network: str,
    more: str = "--epochs 1000000 --commit-seconds 1000000",
    pixels: int | None = None,
) -> list[str]:
    """Return the command that trains a network of `benchmarks.bare` with our
    loop, without evaluations.
    """
    line = f"""hvd-train train --data digits --model benchmarks.bare:{network}
        --image-size {pixels or IMAGE_SIZES[network]} --batch-size {BATCH} --augment none
        --device cpu --eval-epochs 1000000 --output-dir run --learning-rate 0.02
        --weight-decay 0 --channels-last {"on" if network in CHANNELS_LAST else "off"} {more}"""
    return line.split()


def training(network: str, quick: bool) -> list[dict[str, Any]]:
    """Return by how many times a step of an expert's programs takes longer than ours."""
    found = []
    for launcher in ("gloo", "mpi"):
        starts = {"horovod": [*LAUNCHERS[launcher], "python"]}
        commands = {
            program: [
                *starts.get(program, LAUNCHERS["torchrun"]),
                *("-m", "benchmarks.bare", program, network, str(BATCH)),
            ]
            for program in AIMS
        }
        commands["ours"] = [*LAUNCHERS[launcher], *ours(network)]
        of_programs, seconds = compare(commands, *((1, 3, 0.3) if quick else (4, 5, 1.0)))
        for name, ratios in of_programs.items():
            aim = 1.05 if network == "convnet" and name != "alone" else AIMS[name]
            found.append(
                summary(f"{network}: {name} over ours ({launcher})", ratios, "at least", aim)
            )
        found[-1]["seconds_per_step"] = seconds
    return found


def own_cost(quick: bool) -> list[dict[str, Any]]:
    """Return the microseconds of our step beyond a bare loop's, alone, with a
    network of one small layer.
    """
    bare = ["python", "-m", "benchmarks.bare", "alone", "linear", str(BATCH)]
    times = (1, 3, 0.3) if quick else (4, 5, 1.0)
    of_programs, seconds = compare(
        {"bare": bare, "ours": ours("linear")}, *times, variables=ONE_THREAD, ranks=1
    )
    microseconds = [1e6 * seconds["ours"] * (1 - ratio) for ratio in of_programs["bare"]]
    found = summary("own cost of a step, us", microseconds, "at most", 150)
    return [{**found, "seconds_per_step": seconds}]


def slowdown(
    name: str, commands: dict[str, list[str]], most: float, *times: float
) -> dict[str, Any]:
    """Return how many times as long a step of the first command takes as one of the second,
    in one thread of each rank; `times` are starts, turns, and seconds of a turn.
    """
    of_programs, seconds = compare(commands, *times, variables=ONE_THREAD)
    one, other = commands
    values = summary(f"{name}: {one} over {other}", of_programs[one], "at most", most)
    return {**values, "seconds_per_step": seconds}


def elastic(quick: bool) -> list[dict[str, Any]]:
    """Return how many times as long a step of an elastic job takes as one of a static job."""
    found = []
    for network in ["waiting"] if quick else ["waiting", "resnet50"]:
        line = ours(network)
        commands = {"elastic": [*ELASTIC, *line[2:]], "static": [*LAUNCHERS["gloo"], *line]}
        times = (1, 3, 1.0) if quick else (8, 25, 1.0)
        found.append(slowdown(network, commands, 1.01, *times))
    return found


def exact(quick: bool) -> list[dict[str, Any]]:
    """Return how many times as long a step with exact sums takes.

    They cost the same for any image, so their part of a step falls with its size.
    """
    found = []
    for network, pixels, aim in (
        ("resnet18", 32, 1.1),
        ("resnet18", 224, 1.1),
        ("resnet50", 128, 1.05),
        ("resnet50", 224, 1.05),
    ):
        fast = [*LAUNCHERS["gloo"], *ours(network, pixels=pixels)]
        commands = {"exact": [*fast, "--reduction", "exact"], "fast": fast}
        times = (1, 3, 1.0) if quick else (4, 10, 1.0)
        found.append(slowdown(f"{network}, {pixels} px", commands, aim, *times))
    return found


def commits(quick: bool) -> list[dict[str, Any]]:
    """Return the share of the time that one commit a minute takes, which is the default."""
    epochs, every = (2, 14) if quick else (14, 20)
    more = f"--epochs {epochs} --log-steps 1 --commit-steps {every} --commit-seconds 1000000"
    with tempfile.TemporaryDirectory(prefix="commits-") as folder:
        command = [*LAUNCHERS["gloo"], *ours("resnet50", more)]
        output_of(command, Path(folder), limit_s=600, variables=ONE_THREAD)
        steps = [line["time"] for line in records("step", Path(folder) / "run")]
    times = [after - before for before, after in pairwise(steps)]
    costs = []
    half = every // 2
    for commit in range(every, len(times) - every, every):
        after = times[commit - 1 : commit - 1 + every]  # times[n] is the time of step n + 2
        costs.append(sum(after[:half]) - half * statistics.median(after[half:]))
    found = summary(
        "a commit a minute, share of the time", [cost / 60 for cost in costs], "at most", 0.01
    )
    return [{**found, "seconds_per_commit": [round(cost, 3) for cost in costs]}]


if __name__ == "__main__":
    networks = {
        network: partial(training, network)
        for network in IMAGE_SIZES
        if network not in ("linear", "waiting")
    }
    main(
        __doc__,
        "benchmarks.speed",
        {**networks, "own_cost": own_cost, "elastic": elastic, "exact": exact, "commits": commits},
    )
