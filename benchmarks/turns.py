"""Compare two programs that take turns on one machine: a few steps of the one, then
a few steps of the other.

The speed of a machine drifts by several percent within a minute, more than the difference to be
measured. Turns of a second see the same machine. A program takes part by training `gated(model)`,
which waits for its turn before a step. Between its turns all its processes are stopped, so that
each program pays for its own threads only.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from scipy.stats import bootstrap
from torch import nn

from hvd_train.run_files.environment import environment
from tests.support.launching import started

ROOT = Path(__file__).parents[1]
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
# A program that is stopped while others take turns is silent for longer than ranks may be.
PATIENT = dict.fromkeys(
    ("HOROVOD_GLOO_TIMEOUT_SECONDS", "HVD_TRAIN_GLOO_OPERATION_TIMEOUT_SECONDS"), "600"
)
ENVIRONMENT = {**os.environ, **PATIENT, "PATH": PATH, "PYTHONPATH": str(ROOT)}
AS_ROOT = ["--allow-run-as-root"] if os.geteuid() == 0 else []
LAUNCHERS = {
    "gloo": ["horovodrun", "--gloo", "-np", "2"],
    "mpi": ["mpirun", *AS_ROOT, "--oversubscribe", "--bind-to", "none", "-np", "2"],
    "torchrun": ["torchrun", "--standalone", "--nproc-per-node", "2"],
}


def take_turns(
    actions: Mapping[str, Callable[[], float]], turns: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Call the actions in turn, in alternating order; return their results without
    the first `warm_up` turns.
    """
    values = {name: [] for name in actions}
    for turn in range(warm_up + turns):
        for name in list(actions)[:: 1 if turn % 2 else -1]:
            values[name].append(actions[name]())
    return {name: of_turns[warm_up:] for name, of_turns in values.items()}


def summary(name: str, values: Sequence[float], aim: str, limit: float) -> dict[str, Any]:
    """Return the median of values with its 95% interval, and the verdict on an
    aim; print them in one line.

    `aim` is "at least" or "at most" the limit. It is met, or not met, if the whole interval is on
    one side of it. The interval is a bootstrap of the median (Efron 1979) from a fixed seed.
    """
    interval = bootstrap(
        (values,), np.median, n_resamples=2000, method="percentile", random_state=0
    ).confidence_interval
    low, high = (float(f"{edge:.4g}") for edge in interval)
    meets = [edge >= limit if aim == "at least" else edge <= limit for edge in (low, high)]
    found = {
        "comparison": name,
        "median": float(f"{statistics.median(values):.4g}"),
        "interval": [low, high],
        "aim": f"{aim} {limit}",
        "verdict": "met" if all(meets) else "not decided" if any(meets) else "not met",
    }
    print(*found.values(), sep=", ", flush=True)
    return found


def about(module: str) -> dict[str, Any]:
    """Return the command, the date, the machine and the commit of a measurement."""
    machine = environment([socket.gethostname()], None)
    # a copy on another machine may have no git
    line = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return {
        "command": " ".join(["python -m", module, *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {name: machine[name] for name in ("cores", "device", "system", "versions")},
        "commit": commit.strip(),
    }


def write(name: str, module: str, **facts: Any) -> None:
    """Write the record of a measurement."""
    record = json.dumps({**about(module), **facts}, indent=1)
    (ROOT / "benchmarks" / "records" / f"{name}.json").write_text(f"{record}\n")


def main(
    document: str | None,
    module: str,
    measures: Mapping[str, Callable[[bool], list[dict[str, Any]]]],
) -> None:
    """Make the measurements that the command line names, which write a
    record unless --quick is given.
    """
    parser = argparse.ArgumentParser(
        description=document, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="take few turns and write no record")
    parser.add_argument("name", nargs="?", choices=measures, help="the measurement (default: all)")
    options = parser.parse_args()
    for name in [options.name] if options.name else measures:
        comparisons = measures[name](options.quick)
        if not options.quick:
            write(name, module, comparisons=comparisons)


def compare(
    commands: Mapping[str, list[str]],
    starts: int,
    turns: int,
    seconds: float,
    variables: Mapping[str, str] = ENVIRONMENT,
    ranks: int = 2,
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return how many times as long a step of each program takes as one of the last,
    and the seconds per step.

    All are started `starts` times on `ranks` ranks, in alternating order, for `turns` turns of
    `seconds`. A ratio is the median of a start, since another start moves it by 6%; or of a turn if
    there is a single start.
    """
    *others, last = commands
    over_last = {name: [] for name in others}
    times = {name: [] for name in commands}
    for number in range(starts):
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="turns-")))
            programs = {}
            for name in list(commands)[:: 1 if number % 2 else -1]:
                (own := folder / name).mkdir()
                process = stack.enter_context(
                    started(commands[name], own, own / "output.txt", variables)
                )
                programs[name] = Program(process, own, ranks)
            programs[last].turn(5)
            steps = max(3, round(seconds / programs[last].turn(5)))
            actions = {name: partial(programs[name].turn, steps) for name in commands}
            measured = take_turns(actions, turns)
        for name in others:
            ratios = np.divide(measured[name], measured[last]).tolist()
            over_last[name] += [statistics.median(ratios)] if starts > 1 else ratios
        for name, values in measured.items():
            times[name].append(statistics.median(values))
    seconds_per_step = {name: round(statistics.median(values), 5) for name, values in times.items()}
    print(f"seconds per step: {seconds_per_step}", flush=True)
    return over_last, seconds_per_step


def gated(model: nn.Module) -> nn.Module:
    """Make forward passes in training wait until a file in the working folder
    allows them; return the model.
    """
    model.register_forward_pre_hook(_Gate(Path.cwd()))
    return model


class _Gate:
    """Lets a process take the passes that are allowed, and writes the seconds of each
    of its turns into a file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._passes = 0
        self._allowed = 0
        self._released = time.perf_counter()
        self._seconds = []

    def __call__(self, model: nn.Module, _: Any) -> None:
        if not model.training:
            return
        if self._passes == self._allowed:
            self._seconds.append(time.perf_counter() - self._released)
            _replace(self._folder / f"turns-{os.getpid()}", json.dumps(self._seconds))
            while self._passes == self._allowed:
                time.sleep(0.001)
                with contextlib.suppress(FileNotFoundError):
                    self._allowed = int((self._folder / "allowed").read_text())
            self._released = time.perf_counter()
        self._passes += 1


class Program:
    """A running training of `ranks` processes, which are stopped between its turns."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, ranks: int) -> None:
        self.process = process
        self._folder = folder
        self._ranks = ranks
        self._allowed = 0
        self._turns = 0
        self._finished()

    def turn(self, steps: int) -> float:
        """Take a turn of `steps` steps and return the seconds per step of the slowest rank.

        Raises SystemExit.
        """
        self._signal(signal.SIGCONT)
        self._allowed += steps
        self._turns += 1
        _replace(self._folder / "allowed", str(self._allowed))
        return self._finished() / steps

    def _finished(self) -> float:
        """Wait until all ranks end their turn, or the start; stop them, and return the slowest
        rank's seconds. Raises SystemExit.
        """
        end = time.monotonic() + 120
        while time.monotonic() < end and self.process.poll() is None:
            times = [json.loads(path.read_text()) for path in self._folder.glob("turns-*[0-9]")]
            if len(times) == self._ranks and all(
                len(seconds) == self._turns + 1 for seconds in times
            ):
                self._signal(signal.SIGSTOP)
                return max(seconds[-1] for seconds in times)
            time.sleep(0.1)  # a look takes half a millisecond of a core that the ranks need
        output = (self._folder / "output.txt").read_text()[-3000:]
        raise SystemExit(f"{self.process.args!r} did not end its turn:\n{output}")

    def _signal(self, number: int) -> None:
        parent = psutil.Process(self.process.pid)
        for member in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.send_signal(number)


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.rename(path)
