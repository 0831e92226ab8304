"""How long an elastic job takes from a fault or a change of hosts to its next step,
and plain Horovod 0.28.1.

    python -m benchmarks.recovery                      ours (as root; 10 of each: 20 minutes)
    python -m benchmarks.recovery --plain ENVIRONMENT  plain Horovod's (30 minutes)

Three hosts, one worker each, in network namespaces of this machine with ssh between them
(tests/support/hosts.py); a step computes for 0.05 s and takes 60 samples. A fault is timed from its
moment to the end of the first step in the next world, a change of the list of hosts by the time in
which no step ended.
ENVIRONMENT is a virtual environment with torch, scikit-learn, and the wheel that this makes:

    python packaging/build_horovod.py --without-patches --wheel-dir DIR
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.turns import ROOT, write
from tests.support import hosts as cluster
from tests.support.hosts import ALL, Hosts, job, list_hosts
from tests.support.launching import json_lines, started, wait_for, write_program

LIMIT_S = 60.0
REPEATS = 10
KINDS = (
    "process",  # kill -9 of a worker
    "host",  # dies; its connections are reset
    "silent",  # a host is gone, and its connections stay open
    "stopped",  # a worker gets SIGSTOP
    "taken",  # a host is taken from the list
    "joins",  # a host is added to the list
)
# The launcher of a running job; the time of each step's end, its world and the ranks in that; the
# worker on a host.
Case = tuple[Any, Callable[[], list[tuple[float, str, int]]], Callable[[str], psutil.Process]]


def measure(case: Case, hosts: Hosts, folder: Path, kind: str, host: str) -> float | None:
    """Make a fault and return the seconds to the next step, or those in which no step
    ended; None after LIMIT_S.
    """
    launcher, steps, worker = case
    size = 2 if kind == "joins" else 3
    wait_for(
        "the start", lambda: [ranks for _, _, ranks in steps()[-20:]] == [size] * 20, limit_s=120
    )
    world = steps()[-1][1]
    began = time.time()
    if kind in ("process", "stopped"):
        worker(host).send_signal(signal.SIGKILL if kind == "process" else signal.SIGSTOP)
    elif kind in ("host", "silent"):
        (hosts.kill if kind == "host" else hosts.power_off)(host)
    else:
        list_hosts(folder, ALL if kind == "joins" else [name for name in ALL if name != host])
    wanted = size + (1 if kind == "joins" else -1)
    while time.time() < began + LIMIT_S and launcher.poll() is None:
        for (before, _, _), (ended, its_world, ranks) in pairwise(steps()):
            if ended > began and its_world != world and ranks == wanted:
                return ended - (before if kind in ("taken", "joins") else began)
        time.sleep(0.05)
    return None


@contextmanager
def ours(hosts: Hosts, folder: Path, listed: tuple[str, ...]) -> Iterator[Case]:
    """Start an elastic job of ours."""
    training = """--data digits --model benchmarks.plain_elastic:network --epochs 100000
        --batch-size 20 --log-steps 1 --augment none --device cpu --eval-epochs 1000
        --output-dir run"""

    def steps() -> list[tuple[float, str, int]]:
        found = []
        world = size = len(listed)
        for record in json_lines(folder / "run/metrics.jsonl"):
            if record.get("name") == "world":  # stands before the first step of that world
                world = record["time"]
                size = record["world_size"]
            if record["kind"] == "step":
                found.append((record["time"], str(world), size))
        return found

    with job(hosts, folder, listed=listed, training=training.split()) as running:
        yield running.launcher, steps, running.worker


@contextmanager
def plain(environment: Path, hosts: Hosts, folder: Path, listed: tuple[str, ...]) -> Iterator[Case]:
    """Start Horovod's own elastic launcher with `benchmarks/plain_elastic.py`."""
    list_hosts(folder, listed)
    discover = write_program(folder, "discover.sh", f"sed 's/$/:1/' {folder}/hostfile")
    script = str(ROOT / "benchmarks/plain_elastic.py")
    log = folder / "steps.jsonl"
    programs = environment / "bin"
    command = f"""env PATH={programs}:/usr/sbin:/usr/bin:/sbin:/bin OMP_NUM_THREADS=1
        {programs}/horovodrun -np {len(listed)} --min-np 1
        --host-discovery-script {discover} {programs}/python {script} {log}"""

    def steps() -> list[tuple[float, str, int]]:
        return [
            (record["time"], str(record["world"]), record["world_size"])
            for record in json_lines(log)
        ]

    def worker(host: str) -> psutil.Process:
        processes = hosts.processes(host)
        return next(
            p for p, words in processes if words[-2:-1] == [script] and words[0].endswith("python")
        )

    line = hosts.inside("h1", folder, *command.split())
    with started(line, folder, folder / "output.txt") as launcher:
        yield launcher, steps, worker


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--plain", type=Path, metavar="ENVIRONMENT", help="measure the Horovod of this environment"
    )
    options = parser.parse_args()
    if reason := cluster.missing():
        sys.exit(f"recovery: {reason}")
    times = {kind: [] for kind in KINDS}
    for kind in KINDS:
        for number in range(REPEATS):
            with tempfile.TemporaryDirectory(prefix="recovery-") as name:
                folder = Path(name)
                listed = ALL[:2] if kind == "joins" else ALL
                with cluster.hosts(folder / "cluster", 3, names=3) as hosts:
                    start = partial(plain, options.plain) if options.plain else ours
                    with start(hosts, folder, listed) as case:
                        seconds = measure(case, hosts, folder, kind, ALL[1 + number % 2])
            times[kind].append(seconds and round(seconds, 3))
        print(f"{kind}: {times[kind]} s", flush=True)  # None: not within LIMIT_S
    write(f"recovery-{'plain' if options.plain else 'ours'}", "benchmarks.recovery", seconds=times)


if __name__ == "__main__":
    main()
