"""Watches a training from outside, as its user does: when steps end, which are lost, and what is printed when."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from typing_extensions import Self

_EVERY_S = 0.05


class Seen(NamedTuple):
    """What has come at a time of `time.time()`."""

    time: float
    what: str


class Watch:
    """Looks at the metrics (of every step) and the output of a job in a thread of its own until it is left."""

    def __init__(self, folder: Path) -> None:
        """Watch the job of a folder: the only run below runs/, and the files output*.txt; both may come later."""
        self._folder = folder
        self.steps: list[tuple[float, int]] = []
        """When the end of a step was seen, and its number."""
        self.lines: list[Seen] = []
        """The lines of the output."""
        self.lost = 0
        """Steps that were finished, and had to be taken again."""
        self._records = set[tuple[int, float]]()  # the numbers and times of the steps that were seen
        self._highest = 0
        self._read = Counter[Path]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    @property
    def last(self) -> int:
        """The number of finished steps."""
        return self.steps[-1][1] if self.steps else 0

    def pause(self, begun: float) -> Pause:
        """Return the longest time without the end of a step among those that were not over at `begun`."""
        before = [at for at, _ in self.steps if at < begun]
        edges = [*before[-1:], *(at for at, _ in self.steps if at >= begun)]
        pauses = [Pause(one, other) for one, other in itertools.pairwise(edges)]
        return max(pauses, key=lambda pause: pause.seconds, default=Pause(begun, begun))

    def printed(self, pause: Pause) -> list[str]:
        """Return the lines that came in a pause, each with the seconds since its begin."""
        return [f"{at - pause.begin:6.1f} s  {line}" for at, line in self.lines if pause.begin <= at <= pause.end]

    def _watch(self) -> None:
        while not self._over.wait(_EVERY_S):
            self.look()
        self.look()

    def look(self) -> None:
        """Note what is new: the last step, and lines of output."""
        now = time.time()
        for step, written in _last_steps(self._folder / "runs"):
            if (step, written) not in self._records:
                self.lost += step <= self._highest
                self._records.add((step, written))
                self._highest = max(self._highest, step)
                self.steps.append((now, step))
        for path in self._folder.glob("output*.txt"):
            with path.open("rb") as file:
                file.seek(self._read[path])
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read[path] += len(whole)
            self.lines += [Seen(now, line) for line in whole.decode(errors="replace").splitlines()]


class Pause(NamedTuple):
    """A time in which no step ended; times are those of `time.time()`."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.end - self.begin


def _last_steps(folder: Path) -> list[tuple[int, float]]:
    """Return the last steps in the metrics of the only run below a folder, each with the time at which it was written.

    A step that is taken again has another time.
    """
    for path in folder.glob("*/metrics.jsonl"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 20_000))
            whole = [line for line in file.read().splitlines(keepends=True) if line.endswith(b"}\n")]
        records = [json.loads(line) for line in whole if line.startswith(b'{"kind": "step"')]
        return [(record["step"], record["time"]) for record in records]
    return []
