"""Elastic trainings on the hosts of `tests.support.hosts`, watched and disturbed from outside."""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from hvd_train.run_files.ledger import audit
from tests.support.hosts import Hosts, missing
from tests.support.launching import HVD_TRAIN, PROGRAMS, output_of, started, wait_for
from tests.support.on_demand import pace
from tests.support.runs import Weights, largest_difference

NO_HOSTS = missing()
ON_HOSTS = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS or "-"),
]

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "horovodrun_scripts"
WAYS = {
    "horovodrun, Gloo": ["train_hostfile.sh", "hostfile", "--gloo"],
    "horovodrun, MPI": ["train_hostfile.sh", "hostfile", "--mpi"],
    "mpirun": ["train_mpirun.sh", "hostfile"],
    "elastic": ["train_elastic.sh", "--hosts", "hostfile"],
}
ALL = ("h1", "h2", "h3")
OWN = ["env", f"PATH={PROGRAMS}:/usr/sbin:/usr/bin:/sbin:/bin", "OMP_NUM_THREADS=1", f"PYTHONPATH={ROOT}"]
"""The beginning of a command on a host: the programs and the code of this checkout."""
STEPS_PER_EPOCH = 24
TOLERANCE = 1e-5
OBEDIENT = "tests.support.on_demand:obedient"


def arguments(epochs: int = 8, model: str = "tests.support.runs:smooth", more: str = "--output-dir run") -> list[str]:
    """Return arguments of a training of `STEPS_PER_EPOCH * epochs` steps in 3 slots, with a ledger."""
    line = f"--data digits --model {model} --epochs {epochs} --global-batch-size 60 --batch-size 20 --ledger "
    line += f"--learning-rate 0.02 --augment none --log-steps 1 --device cpu --commit-steps 10 {more}"
    return line.split()


def undisturbed(folder: Path, epochs: int = 8, training: Sequence[str] | None = None, limit_s: float = 280) -> Weights:
    """Return the weights of the same training in one undisturbed process."""
    own = ["env", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1"]
    output_of([*own, HVD_TRAIN, "train", *(training or arguments(epochs))], folder, limit_s)
    return torch.load(run_below(folder) / "model-final.pt", weights_only=True)


def run_below(folder: Path) -> Path:
    """Return the only folder below `runs` in `folder`, else `run`."""
    made = [path for path in (folder / "runs").glob("*") if path.is_dir()]
    assert len(made) <= 1, f"the same command started another run: {made}"
    return made[0] if made else folder / "run"


def list_hosts(folder: Path, lines: Sequence[str]) -> None:
    """Replace a job's host file atomically."""
    (folder / "hosts.new").write_text("\n".join(lines) + "\n")
    (folder / "hosts.new").rename(folder / "hostfile")


@dataclass
class Job:
    """A running training that was started on a host, by default h1."""

    hosts: Hosts
    folder: Path
    launcher: subprocess.Popen[bytes]

    @property
    def run(self) -> Path:
        return run_below(self.folder)

    @property
    def steps(self) -> int:
        path = self.run / "ledger.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        return json.loads(whole[-1])["steps"][1] if whole else 0

    @property
    def changes(self) -> list[dict[str, Any]]:
        """The changes of world in the journal."""
        return [event for event in self.worlds if event["name"] == "world"]

    @property
    def worlds(self) -> list[dict[str, Any]]:
        """The changes of world and the starts of the training in the journal."""
        path = self.run / "metrics.jsonl"
        if not path.exists():
            return []
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return [line for line in lines if line.get("name") in ("start", "world")]

    def after(self, steps: int) -> None:
        self._wait_for(f"step {steps}", lambda: self.steps >= steps)

    def reaches(self, size: int) -> None:
        self._wait_for(f"{size} ranks", lambda: [event["world_size"] for event in self.changes][-1:] == [size])

    def _wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        wait_for(what, lambda: condition() or self.launcher.poll() is not None, limit_s=200)
        assert self.launcher.poll() is None, self.output

    def worker(self, host: str) -> psutil.Process:
        return self.hosts.workers(host)[0]

    @property
    def supervisor(self) -> psutil.Process:
        """The supervisor, which replaced the script's process."""
        return psutil.Process(self.launcher.pid).children()[0]

    @property
    def driver(self) -> psutil.Process:
        """Horovod's launcher with our driver in it."""
        return next(p for p in self.supervisor.children() if "hvd_train.elastic.driver" in p.cmdline())

    def list(self, *lines: str) -> None:
        list_hosts(self.folder, lines)

    def completes(self, expected: Weights, limit_s: float = 500) -> None:
        """Wait for the end of the training, at full speed, and check its result."""
        pace(self.folder, 0)
        try:
            assert self.launcher.wait(limit_s) == 0, self.output
        except subprocess.TimeoutExpired:
            workers = [process for host in self.hosts.inits for process in self.hosts.workers(host)]
            for process in workers:
                process.send_signal(signal.SIGABRT)  # PYTHONFAULTHANDLER prints the stacks of their threads
            psutil.wait_procs(workers, timeout=5)
            pytest.fail(f"not done after {limit_s} s\n{self.output}")
        check(self, expected)

    @property
    def output(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("output*.txt")))


@contextmanager
def job(
    hosts: Hosts,
    folder: Path,
    *options: str,
    listed: tuple[str, ...] = ALL,
    training: list[str] | None = None,
    **place: Any,
) -> Iterator[Job]:
    """Train on the listed hosts, and kill remaining processes at the end."""
    list_hosts(folder, listed)
    line = command(hosts, folder, options, training or arguments(), **place)
    with started(line, folder, folder / "output.txt") as launcher:
        yield Job(hosts, folder, launcher)


def command(
    hosts: Hosts,
    folder: Path,
    options: Sequence[str],
    training: Sequence[str],
    environment: Sequence[str] = (),
    start_on: str = "h1",
) -> list[str]:
    """Return the command that trains on the listed hosts, typed on `start_on`."""
    script = [str(SCRIPTS / "train_elastic.sh"), "--hosts", "hostfile", *options, "--", *training]
    return hosts.inside(start_on, folder, *OWN, "PYTHONFAULTHANDLER=1", *environment, *script)


def check(running: Job, expected: Weights, epochs: int = 8, tolerance: float = TOLERANCE) -> float:
    """Assert that no sample or step is lost and the weights are the undisturbed ones; return their distance."""
    report = audit(running.run)
    assert (report.faults, report.epochs, report.steps) == ((), epochs, epochs * STEPS_PER_EPOCH), report
    assert all(change["steps_lost"] == 0 for change in running.changes)
    weights = torch.load(running.run / "model-final.pt", weights_only=True)
    weights.pop("ballast", None)
    difference = largest_difference(weights, expected)
    assert difference <= tolerance, f"{difference} > {tolerance}"
    return difference
