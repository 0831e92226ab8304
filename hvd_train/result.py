"""How a training ended, and how it is described to the user."""

from __future__ import annotations

import math
import os
import shlex
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hvd_train.config import Config
from hvd_train.errors import counted, sendable
from hvd_train.network.models import micro_batch_sizes
from hvd_train.parts import Parts
from hvd_train.run_files.journal import figure, labelled
from hvd_train.state import TrainState
from hvd_train.tasks.task import LOSS, Task
from hvd_train.world.world import Place


@sendable
@dataclass(frozen=True)
class Result:
    """How a training ended. Figures are by name; without an evaluation there are none."""

    run_dir: Path | None
    finished: bool
    # whether the last commit, the weights and the summary are on disk; the same on all ranks
    saved: bool
    stopped_by: int | None  # the number of the signal that stopped any rank; None if no signal did
    epochs: int
    steps: int
    scores: Mapping[str, float]  # of the last evaluation
    best: Mapping[str, float]  # of the best evaluation
    best_epoch: int | None
    test: Mapping[str, float]  # of the best weights on the test set
    # why the training ended: the last epoch is done or an aim was reached; empty if it was stopped
    why: str
    samples_per_second: float
    world_size: int
    seconds: float
    # of the rank with the most: on its GPU, or on a CPU without loader processes
    peak_memory_gib: float = 0.0

    @property
    def exit_code(self) -> int:
        """0 for a finished run, 128 + N if signal N stopped it, 75 if its launcher did, 74
        if files are not on disk.
        """
        if not self.saved:
            return os.EX_IOERR
        if self.finished:
            return 0
        return 128 + self.stopped_by if self.stopped_by else os.EX_TEMPFAIL


class Stopped(SystemExit):
    """Raised by a session on all ranks, with the exit code, if it was asked to stop or
    its last files do not fit.
    """


def describe(config: Config, parts: Parts, state: TrainState, place: Place) -> str:
    """Return one line about the model, the data, the devices and the batch layout."""
    layout = state.layout
    parameters = sum(p.numel() for p in state.model.parameters())
    number = len(layout.micro_batches(range(layout.global_batch)))
    sample = parts.task.sample
    sizes = micro_batch_sizes(layout, layout.global_batch)
    line = (
        f"{config.model.model} ({parameters / 1e6:.2f} M parameters) on {config.data.data} "
        f"({parts.train_loader.num_samples:,} {sample}s), {counted(place.size, 'rank')} on "
        f"{parts.device.type}, {layout.global_batch} {sample}s a step in {number} "
        f"micro-batch{'es' * (number > 1)} of {'up to ' * (len(sizes) > 1)}{max(sizes)}"
    )
    if number < place.size:
        line += f"; {place.size - number} of {place.size} ranks idle"
    if state.progress.step:
        line += f"; resuming at epoch {state.progress.epoch + 1}, step {state.progress.step}"
    return line


def summary(result: Result, config: Config) -> dict[str, Any]:
    """Return the contents of summary.json; numbers that are not known are None."""
    parts = {"scores": "", "best": "best_", "test": "test_"}
    values = {name: value for name, value in vars(result).items() if name not in parts}
    values |= {
        prefix + n: v for part, prefix in parts.items() for n, v in getattr(result, part).items()
    }
    known = {
        name: None if isinstance(v, float) and math.isnan(v) else v for name, v in values.items()
    }
    return {
        **known,
        "run_dir": str(result.run_dir),
        "recipe": config.recipe,
        "torch": torch.__version__,
    }


def ending(result: Result, task: Task) -> str:
    """Return the last lines that a run prints."""
    if not result.finished:
        name = signal.Signals(result.stopped_by).name if result.stopped_by else "its launcher"
        if not result.saved:
            return f"stopped by {name} at step {result.steps}, NOT committed (see above)"
        return (
            f"stopped by {name} at step {result.steps}, committed; the same "
            "command resumes from there"
        )
    name = task.best or next(iter(result.scores), "")
    score = ""
    if result.scores:
        value = result.best.get(task.best or "best")  # what a loop of the user's kept has no name
        best = (
            f" (best {figure(name, value)}, epoch {result.best_epoch})" if value is not None else ""
        )
        score = f"{labelled(name, result.scores[name])}{best}, "
    for tested in dict.fromkeys([LOSS, name]) if result.test else ():
        score += f"test {labelled(tested, result.test[tested])}, "
    lost = "" if result.saved else "\nNOT all files could be written (see above)"
    return (
        f"{result.why}: {score}{result.samples_per_second:,.0f} {task.sample}s/s "
        f"on {counted(result.world_size, 'rank')}, {result.seconds:.0f} s\n"
        f"files: {result.run_dir}\n"
        f"next:  hvd-train report {shlex.quote(str(result.run_dir))}{lost}"
    )
