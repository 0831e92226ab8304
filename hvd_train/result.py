"""Describe for the user how a run began and ended."""

import math
import shlex
import signal
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hvd_train.config import Config
from hvd_train.errors import counted
from hvd_train.goals import reason_to_end
from hvd_train.job import Job
from hvd_train.network.compiled import micro_batch_sizes
from hvd_train.plugin import is_reference
from hvd_train.validate import Scores

ranks = partial(counted, noun="rank")


@dataclass(frozen=True)
class Result:
    """How a training ended. Scores are from the last evaluation (NaN without one), as shares of 1."""

    run_dir: Path | None
    finished: bool
    saved: bool  # whether the last commit, the weights and the summary are on disk; the same on all ranks
    stopped_by: int | None  # the number of the signal that stopped any rank; None if no signal did
    epochs: int
    steps: int
    loss: float
    top1: float
    top5: float
    best_top1: float
    best_epoch: int | None
    test_loss: float
    test_top1: float
    test_top5: float  # the test_ fields are scores of the best weights on the test set; NaN without one
    why: str  # why the training ended: the last epoch is done or an aim was reached; empty if it was stopped
    images_per_second: float
    world_size: int
    seconds: float


def describe(job: Job) -> str:
    """Return one line about the model, the data, the devices and the batch layout."""
    config, training, place = job.config, job.state, job.world.place
    layout, parameters = training.layout, sum(p.numel() for p in training.model.parameters())
    number = len(layout.micro_batches(range(layout.global_batch)))
    sizes = micro_batch_sizes(layout, layout.global_batch)
    line = (
        f"{config.model.model} ({parameters / 1e6:.2f} M parameters) on {config.data.data} "
        f"({job.parts.train_loader.num_samples:,} images), {ranks(place.size)} on {job.parts.device.type}, "
        f"{layout.global_batch} images a step in {number} micro-batch{'es' * (number > 1)} of "
        f"{'up to ' * (len(sizes) > 1)}{max(sizes)}"
    )
    if number < place.size:
        idle = f"{ranks(place.size - number)} of {place.size} idle"
        line += f"; {idle} (a new run may have smaller micro-batches: --batch-size)"
    elif number % place.size:
        line += f"; {number} micro-batches do not divide over {ranks(place.size)}: some idle in part of each step"
    if training.progress.step:
        line += f"; resuming at epoch {training.progress.epoch + 1}, step {training.progress.step}"
    return line


def summary(result: Result, config: Config) -> dict[str, Any]:
    """Return the contents of summary.json; numbers that are not known are None."""
    values = {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in vars(result).items()}
    return {**values, "run_dir": str(result.run_dir), "recipe": config.recipe, "torch": torch.__version__}


def ending(result: Result, config: Config) -> str:
    """Return the last lines that a run prints."""
    if not result.finished:
        name = signal.Signals(result.stopped_by).name if result.stopped_by else "its time limit or its launcher"
        if not result.saved:
            return f"stopped by {name} at step {result.steps}, NOT committed (see above)"
        return f"stopped by {name} at step {result.steps}, committed; the same command resumes from there"
    best = f" (best {result.best_top1:.2%}, epoch {result.best_epoch})" if result.best_epoch else ""
    score = "" if math.isnan(result.top1) else f"top-1 {result.top1:.2%}{best}, "
    if not math.isnan(result.test_top1):
        score += f"test loss {result.test_loss:.4f}, test top-1 {result.test_top1:.2%}, "
    trust = " --trust" if any(map(is_reference, (config.model.model, config.data.data))) else ""
    lost = "" if result.saved else "\nNOT all files could be written (see above)"
    return (
        f"{result.why}: {score}{result.images_per_second:,.0f} images/s on {ranks(result.world_size)}, "
        f"{result.seconds:.0f} s\n"
        f"files: {result.run_dir}\n"
        f"next:  hvd-train evaluate {shlex.quote(str(result.run_dir))}{trust}{lost}"
    )


def result_of(job: Job, *, finished: bool, stopped_by: int | None, saved: bool, test: Scores | None) -> Result:
    """Return the result of a job whose loop has ended; see `Result`."""
    best, last, progress, nan = job.state.best, job.state.last, job.state.progress, math.nan
    return Result(
        run_dir=job.output.path,
        finished=finished,
        saved=saved,
        stopped_by=stopped_by,
        epochs=progress.epoch,
        steps=progress.step,
        loss=last.loss if last else nan,
        top1=last.top1 if last else nan,
        top5=last.top5 if last else nan,
        best_top1=best.top1 if best else nan,
        best_epoch=best.epoch if best else None,
        test_loss=test.loss if test else nan,
        test_top1=test.top1 if test else nan,
        test_top5=test.top5 if test else nan,
        why=reason_to_end(job.config, job.state) or "",
        images_per_second=job.clocks.stopwatch.images_per_second,
        world_size=job.world.place.size,
        seconds=time.perf_counter() - job.clocks.started,
    )
