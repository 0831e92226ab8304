"""Two trainings side by side on one machine that take turns: a few steps of the one, then a few steps of the other.

The speed of a machine drifts by several percent within a minute, more than the difference to be measured; turns of some
seconds see the same machine. A program takes part by training `gated(model)`, which waits for its turn before a step.
While it waits all its processes are stopped, so that each program pays for its own threads only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil

from benchmarks.record import interval

ALLOWED = "allowed"
LONGEST_TURN_S = 120.0


class Hookable(Protocol):
    """The parts of torch.nn.Module that are used here, so that this module need not import torch."""

    training: bool

    def register_forward_pre_hook(self, hook: Any) -> Any:
        """Call the hook before each forward pass, as torch.nn.Module does."""


Model = TypeVar("Model", bound=Hookable)


def gated(model: Model) -> Model:
    """Make the forward passes in training wait for their turn, and return the model.

    A file in the program's working folder says how many passes are allowed so far.
    """
    gate = _Gate(Path.cwd())
    model.register_forward_pre_hook(lambda model, *_: gate.wait() if model.training else None)
    return model


@dataclass
class _Gate:
    """The side of one process: it writes down the seconds of each of its turns at the end of the turn."""

    folder: Path
    passes: int = 0
    released: float = field(default_factory=time.perf_counter)
    allowed: int = 0
    seconds: list[float] = field(default_factory=list)

    def wait(self) -> None:
        if self.passes == self.allowed:
            self.seconds.append(time.perf_counter() - self.released)
            # With the host's name: processes on hosts in namespaces can have the same number.
            times = self.folder / f"turns-{socket.gethostname()}-{os.getpid()}"
            new = times.with_name(f"{times.name}.new")
            new.write_text(json.dumps(self.seconds))
            new.rename(times)
            while self.passes == self.allowed:
                time.sleep(0.001)
                with contextlib.suppress(FileNotFoundError):
                    self.allowed = int((self.folder / ALLOWED).read_text())
            self.released = time.perf_counter()
        self.passes += 1


@dataclass
class Program:
    """A running training of `ranks` processes, which are stopped between its turns."""

    process: subprocess.Popen[bytes]
    folder: Path
    ranks: int
    allowed: int = 0
    turns: int = 0

    def turn(self, steps: int) -> float:
        """Take a turn of `steps` steps and return the seconds per step of the slowest rank.

        Raises SystemExit, with the end of the output, where the program does not come to the end of the turn.
        """
        self._signal(signal.SIGCONT)
        self.allowed += steps
        new = self.folder / f"{ALLOWED}.new"
        new.write_text(str(self.allowed))
        new.rename(self.folder / ALLOWED)
        self.turns += 1
        seconds = self.finished()
        self._signal(signal.SIGSTOP)
        return seconds / steps

    def finished(self) -> float:
        """Wait until all ranks have ended their turn and return the seconds of the slowest.

        Raises SystemExit, with the end of the output, where the program ends or takes longer than LONGEST_TURN_S.
        """
        end = time.monotonic() + LONGEST_TURN_S
        while time.monotonic() < end and self.process.poll() is None:
            times = [json.loads(path.read_text()) for path in self.folder.glob("turns-*[0-9]")]
            if len(times) == self.ranks and all(len(seconds) == self.turns + 1 for seconds in times):
                return max(float(seconds[-1]) for seconds in times)
            time.sleep(0.1)  # a look takes half a millisecond of a core that the ranks want
        output = (self.folder / "output.txt").read_text()[-3000:]
        raise SystemExit(f"{self.process.args!r} has not come to the end of its turn:\n{output}")

    def _signal(self, number: int) -> None:
        process = psutil.Process(self.process.pid)
        for member in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.send_signal(number)

    def end(self) -> None:
        """Kill the program and all processes that it has started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.process.pid)
            for member in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
        self.process.wait()


@contextlib.contextmanager
def started(command: Sequence[str], folder: Path, ranks: int, environment: Mapping[str, str]) -> Iterator[Program]:
    """Start a program in a new folder, wait until all ranks stand before their first step, and kill it at the end.

    Raises SystemExit where they do not get there.
    """
    folder.mkdir()
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
    program = Program(process, folder, ranks)
    try:
        program.finished()
        yield program
    finally:
        program.end()


def compare(first: Program, second: Program, *, turns: int, steps: int, warm_up: int = 3) -> dict[str, Any]:
    """Let both programs take turns; return their seconds per step, and how many times as long the first one takes.

    Values are medians over `turns` turns of `steps` steps, the ratio's with its 95% interval; the first `warm_up` turns
    do not count.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(warm_up + turns):
        for which in (0, 1) if turn % 2 else (1, 0):
            seconds = (first, second)[which].turn(steps)
            if turn >= warm_up:
                times[which].append(seconds)
    ratios = [one / other for one, other in zip(*times, strict=True)]
    low, high = interval(ratios)
    return {
        "seconds_per_step": [round(statistics.median(seconds), 5) for seconds in times],
        "ratio": round(statistics.median(ratios), 4),
        "interval": [round(low, 4), round(high, 4)],
        "turns": turns,
        "steps_per_turn": steps,
    }


def over_starts(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join what `compare` returned for several starts of the same two programs: the median of the starts' ratios.

    The 95% interval is that of the median over the starts; for a single start it is that over its turns.
    """
    ratios = [result["ratio"] for result in results]
    low, high = interval(ratios) if len(results) > 1 else results[0]["interval"]
    seconds = zip(*(result["seconds_per_step"] for result in results), strict=True)
    return {
        "median": round(statistics.median(ratios), 4),
        "interval": [round(low, 4), round(high, 4)],
        "seconds_per_step": [round(statistics.median(of_starts), 5) for of_starts in seconds],
        "ratios_of_starts": ratios,
        "turns_of_a_start": results[0]["turns"],
    }
