"""What compiling by block changes: when gradients leave in a backward pass, and how long start and steps take.

    python -m benchmarks.compiled --json benchmarks/records/compiled.json       about 15 minutes on 2 cores

Two ranks over Gloo train a network with images of 64 pixels: as it is, compiled as one program, and compiled by block,
some steps in turn. Nothing that was compiled before is used. ResNet-50 is compiled without generating code, which takes
long and does not change which gradients leave first.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import about, show
from benchmarks.speed import ENVIRONMENT, LAUNCHERS, ROOT
from hvd_train.bench.tune import interval

BACKENDS = {"resnet18": "inductor", "resnet50": "aot_eager"}
WAYS = ("plain", "one program", "by block")
BATCH = 16  # of each rank
WARM_UP, STEPS = 2, 2
NETWORK, FOLDER = "COMPILED_NETWORK", "COMPILED_FOLDER"  # environment


class Departures:
    """When the first gradients are given to Horovod, as a share of the backward pass."""

    def __init__(self) -> None:
        import horovod.torch as hvd

        self.shares: list[float] = []
        self._began = self._sent = 0.0
        plain = hvd.grouped_allreduce_async_

        @functools.wraps(plain)
        def timed(*arguments: Any, **named: Any) -> Any:
            self._sent = self._sent or time.perf_counter()
            return plain(*arguments, **named)

        hvd.grouped_allreduce_async_ = timed

    def phase_ends(self, phase: str | None) -> None:
        """Note the end of a phase of a step, as `Split.listener` is told of it."""
        now = time.perf_counter()
        if phase == "forward":
            self._began, self._sent = now, 0.0
        if phase == "backward":
            self.shares.append(((self._sent or now) - self._began) / (now - self._began))


def measure_on_this_rank(turns: int) -> None:
    """Train in each way, and write what rank 0 has seen of it."""
    from torch import nn

    from hvd_train import parts
    from hvd_train.bench import throughput
    from hvd_train.commands.train import parse_train
    from hvd_train.launch import roll_call
    from hvd_train.run import connect

    network, folder = os.environ[NETWORK], Path(os.environ[FOLDER])
    flags = ["digits", "--model", network, "--image-size", "64", "--batch-size", str(BATCH)]
    config = throughput.without_files(parse_train(flags, "bench throughput"), own_data=False)
    generic: Any = nn.Module
    generic.compile = functools.partialmethod(nn.Module.compile, backend=BACKENDS[network])
    by_block = parts.blocks_of
    roll_call.started(os.environ)
    result: dict[str, dict[str, Any]] = {}
    with contextlib.closing(connect(config)) as world:
        departures = Departures()
        trainings: dict[str, throughput.Training] = {}
        for way in WAYS:
            parts.blocks_of = by_block if way == "by block" else lambda model: [model]
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / way.replace(" ", "-"))  # a blank is too much for torch
            began = time.perf_counter()
            training = throughput.Training(config.replace(compile=way != "plain"), world)
            training.take(WARM_UP)
            training._split.listener = departures.phase_ends
            trainings[way] = training
            result[way] = {"start": time.perf_counter() - began, "seconds": [], "first_gradients": []}
        for _ in range(turns):
            for way, training in trainings.items():
                departures.shares.clear()
                result[way]["seconds"].append(training.timed(STEPS).seconds / STEPS)
                result[way]["first_gradients"] += departures.shares
        for training in trainings.values():
            training.close()
        if world.place.rank == 0:
            (folder / "result.json").write_text(json.dumps(result))


def measured(network: str, turns: int) -> dict[str, dict[str, Any]]:
    """Return what rank 0 of two has seen of each way to train a network."""
    with tempfile.TemporaryDirectory(prefix="compiled-") as folder:
        environment = {**ENVIRONMENT, NETWORK: network, FOLDER: folder, "CUDA_VISIBLE_DEVICES": ""}
        command = [*LAUNCHERS["gloo"], sys.executable, "-m", "benchmarks.compiled", "--turns", str(turns)]
        subprocess.run([*command, "--on-this-rank"], cwd=ROOT, env=environment, check=True)
        result: dict[str, dict[str, Any]] = json.loads((Path(folder) / "result.json").read_text())
        return result


def summary(network: str, ways: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of what was measured, with 95% intervals, and of ratios within a turn."""
    values = {f"{network}, {way}: first gradients leave after, of the backward pass": ways[way]["first_gradients"]
              for way in WAYS}  # fmt: skip
    if BACKENDS[network] == "inductor":
        for way, other in (("one program", "plain"), ("by block", "plain"), ("by block", "one program")):
            pairs = zip(ways[way]["seconds"], ways[other]["seconds"], strict=True)
            values[f"{network}, seconds of a step: {way} over {other}"] = [one / two for one, two in pairs]
        values |= {f"{network}, {way}: start and {WARM_UP} steps, seconds": [ways[way]["start"]] for way in WAYS}
    return {
        what: {"median": round(statistics.median(numbers), 3), "interval": [round(end, 3) for end in interval(numbers)]}
        if len(numbers) > 1
        else {"median": round(numbers[0], 1)}
        for what, numbers in values.items()
    }


def main() -> None:
    """Measure, print and, if asked to, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--networks", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--on-this-rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="the file that takes the record")
    options = parser.parse_args()
    if options.on_this_rank:
        measure_on_this_rank(options.turns)
        return
    record = {**about("benchmarks.compiled", sys.argv[1:]), "turns": options.turns}
    for network in options.networks:
        record |= summary(network, measured(network, options.turns))
    show(record, options.json)


if __name__ == "__main__":
    main()
