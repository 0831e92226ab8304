"""Watch a training from outside: when steps end, and which are lost."""

import itertools
import json
import threading
import time
from pathlib import Path

from typing_extensions import Self


class Watch:
    """Watch the metrics of a job in a thread; every step must be logged."""

    def __init__(self, folder: Path) -> None:
        """Watch the only run below runs/ in the folder of a job, which may come later."""
        self._folder = folder
        self._ends: list[float] = []  # when the end of a step was seen
        self._records = set[tuple[int, float]]()  # the numbers and times of the steps that were seen
        self.last = 0
        """The number of the step that was finished last."""
        self.lost = 0
        """Steps that were finished and had to be taken again."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def pause(self, begun: float) -> float:
        """Return the longest time between two steps that was not over at `begun`, in seconds."""
        before = [at for at in self._ends if at < begun]
        edges = [*before[-1:], *(at for at in self._ends if at >= begun)]
        return max((end - begin for begin, end in itertools.pairwise(edges)), default=0.0)

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            self._look()
        self._look()

    def _look(self) -> None:
        now = time.time()
        for step, written in _last_steps(self._folder / "runs"):
            if (step, written) not in self._records:
                self.lost += any(step <= earlier for earlier, _ in self._records)
                self._records.add((step, written))
                self._ends.append(now)
                self.last = step


def _last_steps(folder: Path) -> list[tuple[int, float]]:
    """Return the last steps in the metrics, each with its time, which differs if a step is repeated."""
    for path in folder.glob("*/metrics.jsonl"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 20_000))
            whole = [line for line in file.read().splitlines(keepends=True) if line.endswith(b"}\n")]
        records = [json.loads(line) for line in whole if line.startswith(b'{"kind": "step"')]
        return [(record["step"], record["time"]) for record in records]
    return []
