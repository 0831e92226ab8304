"""Run all benchmarks and write docs/benchmarks.md (`make bench`), or show the ratios only (`make bench-quick`)."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from benchmarks.speed import ENVIRONMENT, LAUNCHERS, ROOT

RECORDS = "benchmarks/records"
STEP = "hvd-train bench throughput digits --model resnet18 --image-size 32 --batch-size 30"
CONVNET = "hvd-train bench throughput digits --batch-size 30"
# In the order of the page. Those with several hosts make network namespaces, which needs root.
FULL = {
    "speed": "python -m benchmarks.speed",
    "own": f"python -m benchmarks.own_cost --json {RECORDS}/own-cost.json",
    "memory": f"python -m benchmarks.memory --json {RECORDS}/memory.json",
    "counts": f"python -m benchmarks.counts --json {RECORDS}/counts.json",
    "gloo": f"{' '.join(LAUNCHERS['gloo'])} {STEP} --json {RECORDS}/throughput-gloo.json",
    "mpi": f"{' '.join(LAUNCHERS['mpi'])} {STEP} --json {RECORDS}/throughput-mpi.json",
    "convnet": f"{' '.join(LAUNCHERS['gloo'])} {CONVNET} --json {RECORDS}/throughput-convnet.json",
    "compiled": f"python -m benchmarks.compiled --json {RECORDS}/compiled.json",
    "input": f"python -m benchmarks.input --json {RECORDS}/input.json",
    "wire": f"python -m benchmarks.wire --json {RECORDS}/wire.json",
    "accuracy": f"python -m benchmarks.wire_accuracy --json {RECORDS}/wire-accuracy.json",
    "commits": "python -m benchmarks.ready commits",
    "elastic": "python -m benchmarks.ready elastic",
    "recovery": "python -m benchmarks.recovery",
    "size": f"python -m benchmarks.at_size --json {RECORDS}/at-size.json",
    "startup": f"python -m benchmarks.startup --json {RECORDS}/startup.json",
    "meeting": f"python -m benchmarks.meeting --json {RECORDS}/meeting.json",
    "rounds": f"python -m benchmarks.rounds --json {RECORDS}/rounds.json",
    "order": f"python -m benchmarks.order --json {RECORDS}/order.json",
}
# These record nothing: a few turns show the ratio, but not its interval.
QUICK = [
    "python -m benchmarks.speed --quick",
    "python -m benchmarks.own_cost --starts 1 --epochs 5",
    "python -m benchmarks.input --images 30 --turns 2",
    *(["python -m benchmarks.wire --quick"] if os.geteuid() == 0 else []),
    "python -m benchmarks.ready commits --quick",
    "python -m benchmarks.ready elastic --quick",
    "python -m benchmarks.startup --quick",
    "python -m benchmarks.meeting --ranks 8 --clients 256",
    "python -m benchmarks.order",
]


def main() -> int:
    """Run the benchmarks and return how many of them failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="show the ratios in less than five minutes; write no record and no page"
    )
    parser.add_argument("--only", nargs="+", choices=FULL, default=list(FULL), help="of the full benchmarks, run these")
    options = parser.parse_args()
    failed = 0
    for line in QUICK if options.quick else [*[FULL[name] for name in options.only], "python -m benchmarks.page"]:
        print(f"\n== {line}", flush=True)
        began = time.monotonic()
        failed += subprocess.run(line.split(), cwd=ROOT, env=ENVIRONMENT, check=False).returncode != 0
        print(f"== {time.monotonic() - began:.0f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
