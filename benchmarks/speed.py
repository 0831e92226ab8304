"""Our loop over the programs that users would write without us: ratios of images per second on 2 ranks.

    python -m benchmarks.speed               all comparisons, about 25 minutes on 2 cores
    python -m benchmarks.speed --quick       each started once, about 2 minutes; no record

A comparison is two running trainings that take turns (`benchmarks.turns`), with the same network, batch and number of
threads, without augmentation, evaluation or commits. The record is benchmarks/records/speed.json.
"""

from benchmarks.turns import LAUNCHERS, compare, parser, summary, write

BATCH = 30  # per rank, so that no rank is idle in the last step of an epoch
# Network, our launcher, the other program and its launcher, the least ratio of images per second, and the number of
# starts: a ratio close to its aim needs more.
COMPARISONS = [
    *(("convnet", launcher, "horovod", launcher, 0.98, 16) for launcher in ("gloo", "mpi")),
    *(("resnet18", launcher, "horovod", launcher, 0.98, 8) for launcher in ("gloo", "mpi")),
    *(("resnet18", launcher, "ddp", "torchrun", 1.0, 8) for launcher in ("gloo", "mpi")),
    ("convnet", "gloo", "example", "gloo", 1.3, 8),
]


def ours(model: str, launcher: list[str], more: str = "--epochs 1000000 --commit-seconds 1000000") -> list[str]:
    """Return the command that trains a model with our loop, without evaluations."""
    line = f"hvd-train train --data digits --model {model} --batch-size {BATCH} --augment none --device cpu "
    line += f"--eval-epochs 1000000 --output-dir run --learning-rate 0.02 --weight-decay 0 {more}"
    return [*launcher, *line.split(), *(["--image-size", "32"] if "resnet" in model else [])]


def main() -> None:
    """Measure and, unless --quick is given, write the record."""
    quick, found = parser(__doc__).parse_args().quick, []
    for network, launcher, other, its_launcher, aim, starts in COMPARISONS:
        python = [] if its_launcher == "torchrun" else ["python"]
        theirs = [*LAUNCHERS[its_launcher], *python, "-m", "benchmarks.bare", other, network, str(BATCH)]
        commands = {"other": theirs, "ours": ours(f"benchmarks.bare:{network}", LAUNCHERS[launcher])}
        ratios, facts = compare(commands, *((1, 3, 0.3) if quick else (starts, 5, 1.0)))
        name = f"{network}: ours ({launcher}) over {other} ({its_launcher})"
        found.append({**summary(name, ratios, "at least", aim), **facts})
    if not quick:
        write("speed", "benchmarks.speed", {"comparisons": found})


if __name__ == "__main__":
    main()
