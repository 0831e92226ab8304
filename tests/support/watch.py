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
        """When the number of finished steps was seen to change, and to what."""
        self.lines: list[Seen] = []
        """The lines of the output."""
        self.lost = 0
        """Steps that were finished, and had to be taken again."""
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
        step = _last_step(self._folder / "runs")
        if step is not None and step != self.last:
            self.lost += max(0, self.last - step)
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


def _last_step(folder: Path) -> int | None:
    """Return the last finished step that the metrics of the only run below a folder have; None before the first."""
    for path in folder.glob("*/metrics.jsonl"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 20_000))
            for line in reversed(file.read().splitlines(keepends=True)[1:]):
                if line.endswith(b"\n") and line.startswith(b'{"kind": "step"'):
                    step: int = json.loads(line)["step"]
                    return step
    return None
