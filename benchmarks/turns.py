"""Two trainings side by side on one machine, of which one moves at a time: a few steps here, a few steps there.

Machines drift by several percent within a minute, more than what is to be measured. Turns of some seconds see the same
machine. A program takes part by training `gated(model)`, which waits for its turn before a step; while it waits all its
processes are stopped, so that what a program costs beside its steps is its own cost alone.
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

from hvd_train.bench.tune import interval

ALLOWED = "allowed"
LONGEST_TURN_S = 120.0


class Hookable(Protocol):
    """What of torch.nn.Module is used: nothing else of torch is needed here."""

    training: bool

    def register_forward_pre_hook(self, hook: Any) -> Any:
        """As torch.nn.Module."""


Model = TypeVar("Model", bound=Hookable)


def gated(model: Model) -> Model:
    """The model, whose forward passes in training wait until the folder the program runs in allows their number."""
    gate = _Gate(Path.cwd())
    model.register_forward_pre_hook(lambda model, *_: gate.wait() if model.training else None)
    return model


@dataclass
class _Gate:
    """One process's side: it says when it has come to the end of its turn, and how long the turn took."""

    folder: Path
    passes: int = 0
    released: float = field(default_factory=time.perf_counter)
    allowed: int = 0
    seconds: list[float] = field(default_factory=list)

    def wait(self) -> None:
        if self.passes == self.allowed:
            self.seconds.append(time.perf_counter() - self.released)
            said = self.folder / f"turns-{socket.gethostname()}-{os.getpid()}"  # hosts in namespaces count alike
            new = said.with_name(f"{said.name}.new")
            new.write_text(json.dumps(self.seconds))
            new.rename(said)
            while self.passes == self.allowed:
                time.sleep(0.001)
                with contextlib.suppress(FileNotFoundError):
                    self.allowed = int((self.folder / ALLOWED).read_text())
            self.released = time.perf_counter()
        self.passes += 1


@dataclass
class Program:
    """A running training of so many processes, which stands between its turns."""

    process: subprocess.Popen[bytes]
    folder: Path
    ranks: int
    allowed: int = 0
    turns: int = 0

    def turn(self, steps: int) -> float:
        """Seconds per step of the slowest rank over the next `steps` steps."""
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
        """Wait until all ranks stand at the end of their turn; seconds of the slowest."""
        end = time.monotonic() + LONGEST_TURN_S
        while time.monotonic() < end and self.process.poll() is None:
            said = [json.loads(path.read_text()) for path in self.folder.glob("turns-*[0-9]")]
            if len(said) == self.ranks and all(len(seconds) == self.turns + 1 for seconds in said):
                return max(float(seconds[-1]) for seconds in said)
            time.sleep(0.1)  # looking takes half a millisecond of a core that the ranks want
        output = (self.folder / "output.txt").read_text()[-3000:]
        raise SystemExit(f"{self.process.args!r} has not come to the end of its turn:\n{output}")

    def _signal(self, number: int) -> None:
        process = psutil.Process(self.process.pid)
        for found in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.send_signal(number)

    def end(self) -> None:
        """Kill it and all that it has started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.process.pid)
            for found in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.kill()
        self.process.wait()


@contextlib.contextmanager
def started(command: Sequence[str], folder: Path, ranks: int, environment: Mapping[str, str]) -> Iterator[Program]:
    """Start it and wait until all ranks stand before their first step."""
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
    """Seconds per step of both in turn, and how many times as long the first takes: median, and its 95% interval."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(warm_up + turns):
        for which in (0, 1) if turn % 2 else (1, 0):
            seconds = (first, second)[which].turn(steps)
            if turn >= warm_up:
                times[which].append(seconds)
    ratios = [one / other for one, other in zip(*times, strict=True)]
    low, high = interval(ratios)
    return {
        "seconds_per_step": [round(statistics.median(found), 5) for found in times],
        "ratio": round(statistics.median(ratios), 4),
        "interval": [round(low, 4), round(high, 4)],
        "turns": turns,
        "steps_per_turn": steps,
    }


def over_starts(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What `compare` gave for several starts of the same two programs, as one: the median of the starts' ratios.

    Its 95% interval is that of the starts; one start alone has no spread but that of its turns.
    """
    ratios = [one["ratio"] for one in found]
    low, high = interval(ratios) if len(found) > 1 else found[0]["interval"]
    seconds = zip(*(one["seconds_per_step"] for one in found), strict=True)
    return {
        "median": round(statistics.median(ratios), 4),
        "interval": [round(low, 4), round(high, 4)],
        "seconds_per_step": [round(statistics.median(of_starts), 5) for of_starts in seconds],
        "ratios_of_starts": ratios,
        "turns_of_a_start": found[0]["turns"],
    }
