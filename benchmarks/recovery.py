"""How long an elastic job takes from a fault or a change of hosts to its next step, beside plain Horovod 0.28.1.

    python -m benchmarks.recovery                     ours (as root; about 20 minutes for 10 of each)
    python -m benchmarks.recovery --plain ENVIRONMENT plain Horovod's, from an environment that has it (30 minutes)

Three hosts, one worker each, in network namespaces of this machine with ssh between them (tests/support/hosts.py);
a step computes for 0.05 s and takes 60 samples. A fault is timed from its moment to the end of the first step in the
next world, a change of the list of hosts by the time in which no step ended. Records go to benchmarks/records/.
ENVIRONMENT is a virtual environment with torch, scikit-learn, and the wheel that this makes:

    python packaging/build_horovod.py --without-patches --wheel-dir DIR
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil

from benchmarks.record import RECORDS, about, show
from tests.support import hosts as cluster
from tests.support.elastic_hosts import ALL, ROOT, job, list_hosts
from tests.support.hosts import Hosts
from tests.support.launching import started, wait_for

LIMIT_S = 60.0
KINDS = {
    "process": "kill -9 of a worker",
    "host": "a host dies, its connections are reset",
    "silent": "a host is gone without a word",
    "stopped": "a worker is stopped (SIGSTOP)",
    "taken": "a host is taken from the list",
    "joins": "a host is added to the list, or has come back",
}


@dataclass
class FinishedStep:
    """A finished step: its time in seconds since 1970, its world, and the number of ranks in that."""

    time: float
    world: str
    size: int


@dataclass
class Case:
    """A running job, ours or plain Horovod's, and what a measurement needs of it."""

    hosts: Hosts
    folder: Path
    steps: Callable[[], list[FinishedStep]]
    """Returns all steps so far."""
    worker: Callable[[str], psutil.Process]
    """Returns the worker on a host."""
    running: Callable[[], bool]
    repairs: list[Callable[[], None]] = field(default_factory=list)

    def fault(self, kind: str, host: str) -> None:
        """Make a fault of one of KINDS on a host, and note in `repairs` how it is undone."""
        if kind == "process":
            self.worker(host).kill()
        elif kind == "host":
            self.hosts.kill(host)
            self.repairs.append(lambda: self.hosts.boot(host))
        elif kind == "silent":
            self.hosts.power_off(host)
            self.repairs.append(lambda: self.hosts.boot(host))
        elif kind == "stopped":
            self.worker(host).send_signal(signal.SIGSTOP)
        elif kind == "taken":
            list_hosts(self.folder, [name for name in ALL if name != host])
            self.repairs.append(lambda: list_hosts(self.folder, ALL))
        else:
            list_hosts(self.folder, ALL)

    def steps_with(self, size: int, count: int = 20) -> bool:
        """Return whether `size` ranks took the last `count` steps. Raises AssertionError where the job has ended."""
        assert self.running(), f"the job has ended: {(self.folder / 'output.txt').read_text()[-2000:]}"
        last = self.steps()[-count:]
        return len(last) == count and all(step.size == size for step in last)


def measure(case: Case, kind: str, host: str) -> float | None:
    """Make a fault and return the seconds to the next step, or those in which no step ended.

    None where no step came within LIMIT_S.
    """
    size = case.steps()[-1].size
    wanted = size + 1 if kind == "joins" else size - 1
    case.repairs.clear()
    started = time.time()
    world = case.steps()[-1].world
    case.fault(kind, host)
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and case.running():
        for before, step in pairwise(case.steps()):
            if step.time > started and step.world != world and step.size == wanted:
                return step.time - (before.time if kind in ("taken", "joins") else started)
        time.sleep(0.05)
    return None


def ours(folder: Path, kinds: list[str], repeats: int) -> Iterator[tuple[str, float | None]]:
    """Yield the measurements of our jobs as (kind, seconds).

    There is one job per kind, which goes on from fault to fault; each return of a host is a measurement, too.
    """
    training = "--data digits --model benchmarks.elastic_model:network --epochs 100000 --batch-size 20 --log-steps 1"
    training += " --augment none --device cpu --eval-epochs 1000 --output-dir run"
    for kind in kinds:
        job_folder = folder / kind
        job_folder.mkdir()
        with (
            cluster.hosts(job_folder / "cluster", 3, names=3) as hosts,
            job(hosts, job_folder, "--restarts", "1", training=training.split()) as running,
        ):
            metrics = Metrics(job_folder / "run/metrics.jsonl")
            case = Case(hosts, job_folder, metrics.read, running.worker, lambda: running.launcher.poll() is None)
            wait_for("the start", lambda: case.steps_with(3), limit_s=120)  # noqa: B023
            for number in range(repeats):
                host = ALL[number % 3] if kind in ("process", "stopped", "taken") else ALL[1 + number % 2]
                yield kind, measure(case, kind, host)
                started = time.time()
                for repair in case.repairs:
                    repair()
                wait_for("the world to be whole", lambda: case.steps_with(3), limit_s=120)  # noqa: B023
                yield "joins", pause_at(case.steps(), 3, started)


def pause_at(steps: list[FinishedStep], size: int, since: float) -> float | None:
    """Return the seconds in which no step ended when the world last grew to `size` ranks.

    None where it has not done so since a time, given in seconds since 1970.
    """
    pauses = [b.time - a.time for a, b in pairwise(steps) if a.size < size == b.size and b.time > since]
    return pauses[-1] if pauses else None


class Metrics:
    """The steps of a run of ours, from its metrics.jsonl, which is read on from where the last look ended."""

    def __init__(self, path: Path) -> None:
        self._path, self._file, self._offset = path, 0, 0
        self._steps: list[FinishedStep] = []
        self._size, self._world = 3, 0

    def read(self) -> list[FinishedStep]:
        """Return all steps so far."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            opened = os.fstat(file.fileno())
            if opened.st_ino != self._file or opened.st_size < self._offset:  # another rank has written it anew
                self._file, self._offset, self._steps, self._size, self._world = opened.st_ino, 0, [], 3, 0
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in map(json.loads, whole.splitlines()):
            if line.get("name") == "world":  # stands before the first step of that world
                self._size, self._world = line["world_size"], self._world + 1
            if line["kind"] == "step":
                self._steps.append(FinishedStep(line["time"], str(self._world), self._size))
        return self._steps


def plain(folder: Path, environment: Path, kinds: list[str], repeats: int) -> Iterator[tuple[str, float | None]]:
    """Yield the measurements of plain Horovod as (kind, seconds), each with a job of its own.

    Horovod bars a host after one fault.
    """
    for kind in kinds:
        for number in range(repeats if kind not in ("silent", "stopped") else min(repeats, 2)):
            job_folder = folder / f"{kind}-{number}"
            job_folder.mkdir()
            with plain_job(job_folder, environment, ALL if kind != "joins" else ALL[:2]) as case:
                size = 3 if kind != "joins" else 2
                wait_for("the start", lambda: case.steps_with(size), limit_s=120)  # noqa: B023
                yield kind, measure(case, kind, ALL[1 + number % 2])


@contextmanager
def plain_job(folder: Path, environment: Path, listed: tuple[str, ...]) -> Iterator[Case]:
    """Start Horovod's own elastic launcher with the script beside this file, on the hosts listed; end it at the end."""
    list_hosts(folder, listed)
    (folder / "discover.sh").write_text(f"#!/bin/sh\nsed 's/$/:1/' {folder}/hostfile\n")
    (folder / "discover.sh").chmod(0o755)
    log = folder / "steps.jsonl"
    programs, script = environment / "bin", str(ROOT / "benchmarks/plain_elastic.py")
    command = [
        "env",
        f"PATH={programs}:/usr/sbin:/usr/bin:/sbin:/bin",
        "OMP_NUM_THREADS=1",
        str(programs / "horovodrun"),
    ]
    command += ["-np", str(len(listed)), "--min-np", "1", "--host-discovery-script", str(folder / "discover.sh")]
    command += [str(programs / "python"), script, str(log)]

    def steps() -> list[FinishedStep]:
        text = log.read_text() if log.exists() else ""
        records = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        return [FinishedStep(record["time"], str(record["world"]), record["world_size"]) for record in records]

    def worker(host: str) -> psutil.Process:
        processes = hosts.processes(host)
        return next(p for p, words in processes if words[-2:-1] == [script] and words[0].endswith("python"))

    with (
        cluster.hosts(folder / "cluster", 3, names=3) as hosts,
        started(hosts.inside("h1", folder, *command), folder, folder / "output.txt") as launcher,
    ):
        yield Case(hosts, folder, steps, worker, lambda: launcher.poll() is None)


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", type=Path, metavar="ENVIRONMENT", help="measure the Horovod of this environment")
    parser.add_argument("--repeats", type=int, default=10, help="measurements of each kind (default: 10)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="which of them")
    options = parser.parse_args()
    if reason := cluster.missing():
        sys.exit(f"recovery: {reason}")
    times: dict[str, list[float | None]] = {kind: [] for kind in options.kinds}
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        if options.plain:
            results = plain(Path(name), options.plain, options.kinds, options.repeats)
        else:  # every host that leaves comes back, which measures `joins`
            results = ours(Path(name), [kind for kind in options.kinds if kind != "joins"], options.repeats)
        for kind, seconds in results:
            times.setdefault(kind, []).append(seconds)
            print(f"{kind:8} {'not within 60 s' if seconds is None else f'{seconds:.2f} s'}", flush=True)
    path = RECORDS / f"recovery-{'plain' if options.plain else 'ours'}.json"
    earlier = json.loads(path.read_text())["seconds"] if path.exists() else {}  # of other kinds
    rounded = {kind: [s and round(s, 3) for s in series] for kind, series in times.items()}
    arguments = [*(["--plain", "ENVIRONMENT"] if options.plain else []), "--repeats", str(options.repeats)]
    record = {**about("benchmarks.recovery", arguments), "seconds": {**earlier, **rounded}}
    show(record, path)
    for kind, series in times.items():
        in_time = [s for s in series if s is not None]
        median = f"{statistics.median(in_time):.2f} s" if in_time else "-"
        print(f"{KINDS[kind]:45} median {median:>8} of {len(series)}, {len(series) - len(in_time)} not within 60 s")


if __name__ == "__main__":
    main()
