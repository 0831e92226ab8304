"""Our loop beside the programs that users would write without us: ratios of images per second on 2 ranks.

    python -m benchmarks.speed               all series, about 40 minutes on 2 cores
    python -m benchmarks.speed --quick       two of them, each started once, about 2 minutes
    python -m benchmarks.speed --device cuda --starts 2      ResNet-50 on GPUs, about half an hour

A series is several running trainings that take turns (`benchmarks.turns`), with the same network, batch and number of
threads, without augmentation, evaluation or commits: ours, peers as an expert writes them (with the best of a few sizes
of the pieces in which gradients travel, found before the series), and `none`, whose ranks exchange nothing: the limit.
Further series have peers as most write them, for a record of their own. All are started several times: turns within a
start agree with each other, but another start of the same programs moves the ratio of their steps by 6% (their memory
lies and their threads run elsewhere), which is more than the difference to be measured. The records go to
benchmarks/records/speed.json and speed-plain.json, that of GPUs to speed-cuda.json. On a GPU a turn ends when the
device is idle.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.record import RECORDS, about, at_least, at_most, show
from benchmarks.turns import Program, median_ratio, ratio_over_starts, started, take_turns

ROOT = Path(__file__).parents[1]
PROGRAMS = Path(sys.executable).parent
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
}
AS_ROOT = ["--allow-run-as-root"] if os.geteuid() == 0 else []
LAUNCHERS = {
    "gloo": ["horovodrun", "--gloo", "-np", "2"],
    "mpi": ["mpirun", *AS_ROOT, "--oversubscribe", "--bind-to", "none", "-np", "2"],
    "torchrun": ["torchrun", "--standalone", "--nproc-per-node", "2"],
    "one rank": ["horovodrun", "--gloo", "-np", "1"],
}
RANKS = 2
STARTS = 6  # of each series; with fewer it is a first look
EXPERT_AIM = 1.05  # times the images per second of a peer as an expert writes it
AIM_ON_GPU = 0.97
LIMITS = {"resnet18": 1.08, "resnet50": 1.08, "vgg11": 1.15}  # the most of our time per step over that of `none`
# Of images, and how many on each rank: so many that no rank is idle in the last step of an epoch.
SIZES = {"convnet": (8, 30), "resnet18": (32, 30), "resnet50": (64, 16), "mobilenet": (64, 16), "vgg11": (32, 8)}
BUCKETS_MB = {"horovod-expert": (0, 4, 25), "ddp-expert": (4, 25, 100)}  # of which the best one is taken


@dataclass(frozen=True)
class OnGpu:
    """How all programs of a series train on GPUs."""

    batch: int
    """Images on each rank."""
    ranks: int = 1
    precision: str = "fp16"
    compiled: bool = False
    image_size: int = 224

    @property
    def flags(self) -> list[str]:
        """The flags that our side and `benchmarks.bare` have in common."""
        line = f"--device cuda --image-size {self.image_size} --precision {self.precision}"
        return [*line.split(), *(["--compile"] if self.compiled else [])]


@dataclass(frozen=True)
class Peer:
    """A program of `benchmarks.bare` under a launcher."""

    program: str
    launcher: str
    aim: float | None = None
    """The least ratio of images per second, ours over the peer's; of `none`, the most of our time over its time."""
    bucket_mb: int | None = None
    """In pieces of how many MB gradients travel, where this can be chosen: 0 sends each tensor alone."""

    @property
    def is_limit(self) -> bool:
        """Whether its ranks exchange nothing."""
        return self.program == "none"

    @property
    def name(self) -> str:
        """What it is called in a record."""
        return self.program if self.is_limit else f"{self.program} ({self.launcher})"


@dataclass(frozen=True)
class Series:
    """Our loop under one launcher beside its peers."""

    network: str
    launcher: str
    peers: tuple[Peer, ...]
    gpu: OnGpu | None = None
    """How it is on GPUs; without it all train on two ranks of CPUs."""

    @property
    def name(self) -> str:
        """What is trained and how."""
        gpu = self.gpu
        how = f", {gpu.precision}, batch {gpu.batch}{', compiled' * gpu.compiled}, {gpu.ranks} GPU" if gpu else ""
        return f"{self.network}{how}: ours ({self.launcher}) beside {', '.join(peer.name for peer in self.peers)}"

    @property
    def ranks(self) -> int:
        """The number of ranks of each program."""
        return self.gpu.ranks if self.gpu else RANKS


def by_experts(network: str) -> Series:
    """Return the series of a network with peers as an expert writes them, over Gloo, and with the limit."""
    peers = (
        Peer("horovod-expert", "gloo", EXPERT_AIM),
        Peer("ddp-expert", "torchrun", EXPERT_AIM),
        Peer("none", "torchrun", LIMITS.get(network)),
    )
    return Series(network, "gloo", peers)


BY_EXPERTS = [*map(by_experts, SIZES), Series("resnet18", "mpi", (Peer("horovod-expert", "mpi", EXPERT_AIM),))]
AS_MOST_WRITE_THEM = [
    Series("resnet18", "gloo", (Peer("horovod", "gloo"), Peer("ddp", "torchrun"))),
    Series("convnet", "gloo", (Peer("horovod", "gloo"), Peer("example", "gloo"))),
]
QUICK = [by_experts("resnet18"), Series("convnet", "gloo", (Peer("horovod-expert", "gloo", EXPERT_AIM, bucket_mb=0),))]


def on_gpus(count: int) -> list[Series]:
    """Return the series for a machine with so many GPUs: each batch on one of them, then on all."""
    one = [OnGpu(batch) for batch in (64, 208, 512)] + [OnGpu(208, compiled=True), OnGpu(208, precision="bf16")]
    pairs = [("none", "alone", "none"), ("gloo", "horovod-expert", "gloo")]
    both = [(gpu, *pair) for gpu in one for pair in pairs]
    if count > 1:
        pairs = [("gloo", "horovod-expert", "gloo"), ("gloo", "ddp-expert", "torchrun")]
        both += [(OnGpu(208, count), *pair) for pair in pairs]
    return [
        Series("resnet50", launcher, (Peer(program, others, AIM_ON_GPU),), gpu=gpu)
        for gpu, launcher, program, others in both
    ]


def launch(name: str, ranks: int) -> list[str]:
    """Return a launcher's part of a command line."""
    return [] if name == "none" else [*LAUNCHERS[name][:-1], str(ranks)]


def ours(model: str, batch: int, launcher: str, *, ranks: int = RANKS, epochs: int = 1_000_000) -> list[str]:
    """Return the command that trains `model`, a `module:function`, with our loop and `batch` images on each rank."""
    line = f"train --data digits --model {model} --global-batch-size {ranks * batch} "
    line += f"--batch-size {batch} --augment none --device cpu --epochs {epochs} --eval-epochs 1000000 "
    line += "--log-steps 100 --output-dir run --commit-seconds 1000000 "
    line += "--learning-rate 0.02 --weight-decay 0 --no-nesterov"
    return [*launch(launcher, ranks), "hvd-train", *line.split()]


def command_of_ours(series: Series) -> list[str]:
    """Return the command of our side of a series."""
    network, gpu = f"benchmarks.networks:{series.network}", series.gpu
    if gpu is None:
        image_size, batch = SIZES[series.network]
        return [*ours(network, batch, series.launcher), "--image-size", str(image_size)]
    command = ours(network, gpu.batch, series.launcher, ranks=gpu.ranks)
    return [*command, *f"--data synthetic --synthetic-samples {2**20}".split(), *gpu.flags]


def command_of_peer(series: Series, peer: Peer) -> list[str]:
    """Return the command of a peer in a series."""
    python = [] if peer.launcher == "torchrun" else ["python"]
    if series.gpu:
        batch, flags = series.gpu.batch, series.gpu.flags
    else:
        image_size, batch = SIZES[series.network]
        flags = ["--image-size", str(image_size)]
    if peer.bucket_mb is not None:
        flags = [*flags, "--bucket-mb", str(peer.bucket_mb)]
    program = ["-m", "benchmarks.bare", peer.program, series.network, str(batch)]
    return [*launch(peer.launcher, series.ranks), *python, *program, *flags]


@contextlib.contextmanager
def _running(
    commands: Mapping[str, Sequence[str]], ranks: int, seconds: float
) -> Iterator[tuple[dict[str, Program], int]]:
    """Start programs, and give them with the number of steps that the last one takes in about so many seconds."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="speed-")))
        programs = {
            name: stack.enter_context(started(command, folder / str(number), ranks, ENVIRONMENT))
            for number, (name, command) in enumerate(commands.items())
        }
        last = list(programs.values())[-1]
        last.turn(2)
        yield programs, max(2, round(seconds / last.turn(3)))


def with_best_buckets(series: Series, turns: int, seconds: float) -> Series:
    """Return a series whose peers send gradients in pieces of the size with which their steps are shortest."""
    if series.gpu:
        return series
    return replace(series, peers=tuple(_with_best_bucket(series, peer, turns, seconds) for peer in series.peers))


def _with_best_bucket(series: Series, peer: Peer, turns: int, seconds: float) -> Peer:
    choice = {f"{size} MB": replace(peer, bucket_mb=size) for size in BUCKETS_MB.get(peer.program, ())}
    if not choice:
        return peer
    commands = {size: command_of_peer(series, one) for size, one in choice.items()}
    with _running(commands, series.ranks, seconds) as (programs, steps):
        times = take_turns(programs, turns=turns, steps=steps, warm_up=1)
    medians = {size: statistics.median(seconds) for size, seconds in times.items()}
    shown = ", ".join(f"{size} {median * 1000:.1f} ms" for size, median in medians.items())
    print(f"{series.network}: {peer.name} with pieces of {shown}", flush=True)
    return choice[min(medians, key=medians.__getitem__)]


def measure(series: Series, starts: int, turns: int, seconds: float) -> dict[str, Any]:
    """Start a series `starts` times, each time for `turns` turns of about `seconds`, and compare its programs."""
    found = [_one_start(series, turns, seconds, ours_first=bool(start % 2)) for start in range(starts)]
    medians = {name: statistics.median(statistics.median(times[name]) for times in found) for name in found[0]}
    beside = {peer.name: _beside(peer, found) for peer in series.peers}
    print(series.name)
    for name, ratio in beside.items():
        aim = f", {ratio['aim']}: {ratio['verdict']}" if "aim" in ratio else ""
        shown = f"{ratio['median']} ({ratio['interval'][0]} to {ratio['interval'][1]}){aim}"
        milliseconds = f"{medians['ours'] * 1000:.1f} and {medians[name] * 1000:.1f} ms a step"
        print(f"  {ratio['of']} over {name}: {shown}; {milliseconds}", flush=True)
    return {
        "series": series.name,
        "network": series.network,
        "launcher": series.launcher,
        "seconds_per_step": {name: round(median, 5) for name, median in medians.items()},
        "turns_of_a_start": turns,
        "beside": beside,
    }


def _one_start(series: Series, turns: int, seconds: float, *, ours_first: bool) -> dict[str, list[float]]:
    """Start all programs of a series once and return the seconds per step of each one's turns."""
    commands = {peer.name: command_of_peer(series, peer) for peer in series.peers}
    commands = (
        {"ours": command_of_ours(series), **commands} if ours_first else {**commands, "ours": command_of_ours(series)}
    )
    with _running(commands, series.ranks, seconds) as (programs, steps):
        return take_turns(programs, turns=turns, steps=steps, warm_up=1)


def _beside(peer: Peer, starts: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """Return the ratio of our images per second to a peer's, or of our time to that of the limit, and its verdict."""
    pairs = [(times["ours"], times[peer.name]) for times in starts]
    ratios = [median_ratio(ours, its) if peer.is_limit else median_ratio(its, ours) for ours, its in pairs]
    found = ratio_over_starts(ratios)
    found["of"] = "time" if peer.is_limit else "images/s"
    if peer.bucket_mb is not None:
        found["bucket_mb"] = peer.bucket_mb
    if peer.aim is not None:
        verdict = at_most if peer.is_limit else at_least
        found |= {
            "aim": f"{'at most' if peer.is_limit else 'at least'} {peer.aim}",
            "verdict": verdict(peer.aim, found["interval"]),
        }
    return found


def main() -> None:
    """Measure and, if all series were taken in full, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where all programs train")
    parser.add_argument("--quick", action="store_true", help="take two series, start each once, and write no record")
    parser.add_argument("--starts", type=int, default=STARTS, help=f"starts of each series (default: {STARTS})")
    parser.add_argument("--turns", type=int, default=5, help="turns of each program in each start (default: 5)")
    parser.add_argument("--only", default="", help="only series whose name contains this; write no record")
    options = parser.parse_args()
    starts, turns, seconds = (1, 3, 0.3) if options.quick else (options.starts, options.turns, 1.0)
    records = {"speed": QUICK} if options.quick else {"speed": BY_EXPERTS, "speed-plain": AS_MOST_WRITE_THEM}
    if options.device == "cuda":
        import torch  # slow, and the programs that are compared have their own

        if not torch.cuda.is_available():
            parser.error("--device cuda: torch sees no GPU here; `hvd-train doctor` says why")
        records = {"speed-cuda": on_gpus(torch.cuda.device_count())}
    for name, all_series in records.items():
        chosen = [series for series in all_series if options.only in series.name]
        if not options.quick:
            chosen = [with_best_buckets(series, turns, seconds) for series in chosen]
        measured = [measure(series, starts, turns, seconds) for series in chosen]
        if not options.only and not options.quick:
            show({**about("benchmarks.speed", sys.argv[1:]), "series": measured}, RECORDS / f"{name}.json")


if __name__ == "__main__":
    main()
