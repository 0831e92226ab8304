"""How long a fault or a change of hosts keeps an elastic job from its next step, beside plain Horovod 0.28.1.

    python -m benchmarks.recovery                     ours (as root; about 20 minutes for 10 of each)
    python -m benchmarks.recovery --plain ENVIRONMENT plain Horovod's, from an environment that has it (30 minutes)

Three hosts, one worker each, in network namespaces of this machine with ssh between them (tests/support/hosts.py);
0.05 s of computing for 20 samples, 60 samples a step. A fault counts from the moment it is made to the end of the first
step in the next world; a change of the list counts as the time in which no step ended. Records go to
benchmarks/records/.
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

from benchmarks.record import RECORDS, about
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
    "joins": "a host is added to the list, or is back",
}


@dataclass
class Line:
    """A finished step: when, in which world, and how many ranks were in it."""

    time: float
    world: str
    size: int


@dataclass
class Case:
    """A job under way, whoever's it is."""

    hosts: Hosts
    folder: Path
    lines: Callable[[], list[Line]]
    worker: Callable[[str], psutil.Process]
    """That of a host."""
    running: Callable[[], bool]
    healing: list[Callable[[], None]] = field(default_factory=list)

    def fault(self, kind: str, host: str) -> None:
        """Make it, and note how it is undone."""
        if kind == "process":
            self.worker(host).kill()
        elif kind == "host":
            self.hosts.kill(host)
            self.healing.append(lambda: self.hosts.boot(host))
        elif kind == "silent":
            self.hosts.power_off(host)
            self.healing.append(lambda: self.hosts.boot(host))
        elif kind == "stopped":
            self.worker(host).send_signal(signal.SIGSTOP)
        elif kind == "taken":
            list_hosts(self.folder, [name for name in ALL if name != host])
            self.healing.append(lambda: list_hosts(self.folder, ALL))
        else:
            list_hosts(self.folder, ALL)

    def steps_with(self, size: int, count: int = 20) -> bool:
        """Whether the last so many steps were done by so many ranks."""
        assert self.running(), f"the job has ended: {(self.folder / 'output.txt').read_text()[-2000:]}"
        last = self.lines()[-count:]
        return len(last) == count and all(line.size == size for line in last)


def measure(case: Case, kind: str, host: str) -> float | None:
    """Seconds from the fault to the next step, or in which no step ended; None where nothing came within the limit."""
    size = case.lines()[-1].size
    wanted = size + 1 if kind == "joins" else size - 1
    case.healing.clear()
    begun = time.time()
    world = case.lines()[-1].world
    case.fault(kind, host)
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and case.running():
        lines = case.lines()
        for before, line in pairwise(lines):
            if line.time > begun and line.world != world and line.size == wanted:
                return line.time - (before.time if kind in ("taken", "joins") else begun)
        time.sleep(0.05)
    return None


def ours(folder: Path, kinds: list[str], repeats: int) -> Iterator[tuple[str, float | None]]:
    """One job per kind, which goes on from fault to fault; each return of a host is a measurement, too."""
    training = "--data digits --model benchmarks.elastic_model:network --epochs 100000 --batch-size 20 --log-steps 1"
    training += " --augment none --device cpu --eval-epochs 1000 --output-dir run"
    for kind in kinds:
        place = folder / kind
        place.mkdir()
        with (
            cluster.hosts(place / "cluster", 3, names=3) as hosts,
            job(hosts, place, "--restarts", "1", training=training.split()) as running,
        ):
            metrics = Metrics(place / "run/metrics.jsonl")
            case = Case(hosts, place, metrics.read, running.worker, lambda: running.launcher.poll() is None)
            wait_for("the start", lambda: case.steps_with(3), limit_s=120)  # noqa: B023
            for number in range(repeats):
                host = ALL[number % 3] if kind in ("process", "stopped", "taken") else ALL[1 + number % 2]
                yield kind, measure(case, kind, host)
                begun = time.time()
                for heal in case.healing:
                    heal()
                wait_for("the world to be whole", lambda: case.steps_with(3), limit_s=120)  # noqa: B023
                yield "joins", pause_at(case.lines(), 3, begun)


def pause_at(lines: list[Line], size: int, begun: float) -> float | None:
    """Seconds in which no step ended when the world last came to this size; None where it had not left it."""
    pauses = [b.time - a.time for a, b in pairwise(lines) if a.size < size == b.size and b.time > begun]
    return pauses[-1] if pauses else None


class Metrics:
    """Steps of a run of ours, from its metrics.jsonl, which is read on from where it was left."""

    def __init__(self, path: Path) -> None:
        self._path, self._file, self._offset = path, 0, 0
        self._lines: list[Line] = []
        self._size, self._world = 3, 0

    def read(self) -> list[Line]:
        """All steps so far."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            opened = os.fstat(file.fileno())
            if opened.st_ino != self._file or opened.st_size < self._offset:  # another rank writes it anew
                self._file, self._offset, self._lines, self._size, self._world = opened.st_ino, 0, [], 3, 0
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in map(json.loads, whole.splitlines()):
            if line.get("name") == "world":  # stands before its first step
                self._size, self._world = line["world_size"], self._world + 1
            if line["kind"] == "step":
                self._lines.append(Line(line["time"], str(self._world), self._size))
        return self._lines


def plain(folder: Path, environment: Path, kinds: list[str], repeats: int) -> Iterator[tuple[str, float | None]]:
    """A job per measurement: Horovod bars a host after one fault."""
    for kind in kinds:
        for number in range(repeats if kind not in ("silent", "stopped") else min(repeats, 2)):
            place = folder / f"{kind}-{number}"
            place.mkdir()
            with plain_job(place, environment, ALL if kind != "joins" else ALL[:2]) as case:
                size = 3 if kind != "joins" else 2
                wait_for("the start", lambda: case.steps_with(size), limit_s=120)  # noqa: B023
                yield kind, measure(case, kind, ALL[1 + number % 2])


@contextmanager
def plain_job(folder: Path, environment: Path, listed: tuple[str, ...]) -> Iterator[Case]:
    """Horovod's own elastic launcher and the script beside this file."""
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

    def lines() -> list[Line]:
        text = log.read_text() if log.exists() else ""
        found = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        return [Line(line["time"], str(line["world"]), line["world_size"]) for line in found]

    def worker(host: str) -> psutil.Process:
        found = hosts.processes(host)
        return next(p for p, words in found if words[-2:-1] == [script] and words[0].endswith("python"))

    with (
        cluster.hosts(folder / "cluster", 3, names=3) as hosts,
        started(hosts.inside("h1", folder, *command), folder, folder / "output.txt") as launcher,
    ):
        yield Case(hosts, folder, lines, worker, lambda: launcher.poll() is None)


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", type=Path, metavar="ENVIRONMENT")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    if reason := cluster.missing():
        sys.exit(f"recovery: {reason}")
    found: dict[str, list[float | None]] = {kind: [] for kind in options.kinds}
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        if options.plain:
            results = plain(Path(name), options.plain, options.kinds, options.repeats)
        else:  # whoever leaves comes back: that is where joins come from
            results = ours(Path(name), [kind for kind in options.kinds if kind != "joins"], options.repeats)
        for kind, seconds in results:
            found.setdefault(kind, []).append(seconds)
            print(f"{kind:8} {'not within 60 s' if seconds is None else f'{seconds:.2f} s'}", flush=True)
    path = RECORDS / f"recovery-{'plain' if options.plain else 'ours'}.json"
    earlier = json.loads(path.read_text())["seconds"] if path.exists() else {}  # of kinds that are not measured now
    rounded = {kind: [s and round(s, 3) for s in series] for kind, series in found.items()}
    options_given = [*(["--plain", "ENVIRONMENT"] if options.plain else []), "--repeats", str(options.repeats)]
    record = {**about("benchmarks.recovery", options_given), "seconds": {**earlier, **rounded}}
    path.write_text(json.dumps(record, indent=1) + "\n")
    for kind, series in found.items():
        in_time = [s for s in series if s is not None]
        median = f"{statistics.median(in_time):.2f} s" if in_time else "-"
        print(f"{KINDS[kind]:45} median {median:>8} of {len(series)}, {len(series) - len(in_time)} not within 60 s")


if __name__ == "__main__":
    main()
