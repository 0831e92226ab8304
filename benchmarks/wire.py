"""Gradients as fp16 against fp32 on a slow link: steps per second of VGG-11 on two hosts 1 Gbit/s apart.

    python -m benchmarks.wire --json benchmarks/records/wire.json       about 15 minutes on 2 cores; needs root

Two hosts in network namespaces of this machine (tests/support/hosts.py), whose links `tc ... tbf` limits to 1 Gbit/s
each way, run the same training twice: 8 images of 32 pixels a rank, 128.8 million parameters. The two take turns
(`benchmarks.turns`); each rank waits before its step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.record import about, at_least, show
from benchmarks.speed import ENVIRONMENT, PROGRAMS
from benchmarks.turns import Program, compare
from tests.support import hosts as cluster
from tests.support.hosts import Hosts

NAMES = ("h1", "h2")
LINK = "tbf rate 1gbit burst 256kb latency 50ms"
AIM = 1.6
PATIENT = {"OMP_NUM_THREADS": "1", "HOROVOD_GLOO_TIMEOUT_SECONDS": "1000"}  # longer than a turn of the other program


class Waiting(Program):
    """A program on other hosts, whose processes wait between its turns and are not stopped."""

    def _signal(self, number: int) -> None:
        pass


@contextlib.contextmanager
def training(hosts: Hosts, folder: Path, compression: str) -> Iterator[Program]:
    """Start the training and wait until both ranks stand before their first step; kill it at the end.

    Raises SystemExit where they do not get there.
    """
    folder.mkdir()
    line = "train --data digits --model benchmarks.networks:vgg11 --image-size 32 --global-batch-size 16 --batch-size 8"
    line += f" --compression {compression} --device cpu --augment none --momentum 0 --no-nesterov --learning-rate 0.01 "
    line += "--epochs 1000 --eval-epochs 1000 --commit-seconds 1000000 --output-dir run"
    launcher = [str(PROGRAMS / "horovodrun"), "--gloo", "-np", "2", "-H", "h1:1,h2:1", str(PROGRAMS / "hvd-train")]
    with (folder / "output.txt").open("wb") as output:
        command = hosts.inside("h1", folder, *launcher, *line.split())
        process = subprocess.Popen(command, env={**ENVIRONMENT, **PATIENT}, stdout=output, stderr=output)
    program = Waiting(process, folder, ranks=2)
    try:
        program.finished()
        yield program
    finally:
        program.end()


def main() -> None:
    """Measure, print and, if asked to, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="take one turn, in half a minute")
    parser.add_argument("--json", type=Path, help="the file that takes the record")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wire-")))
        hosts = stack.enter_context(cluster.hosts(folder / "cluster", len(NAMES), names=len(NAMES)))
        for name in NAMES:
            tc = hosts.inside(name, folder, "tc", "qdisc", "add", "dev", "eth0", "root", *LINK.split())
            subprocess.run(tc, check=True, env={**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"})
        fp32, fp16 = (stack.enter_context(training(hosts, folder / wire, wire)) for wire in ("none", "fp16"))
        quick = options.quick
        comparison = compare(fp32, fp16, turns=1 if quick else options.turns, steps=1 if quick else 2, warm_up=1)
    times = dict(zip(("fp32", "fp16"), comparison.pop("seconds_per_step"), strict=True))
    verdict = at_least(AIM, comparison["interval"])
    facts = {"link": LINK, "seconds_per_step": times, **comparison, "aim": f"at least {AIM}", "verdict": verdict}
    show({**about("benchmarks.wire", sys.argv[1:]), **facts}, options.json)


if __name__ == "__main__":
    main()
