"""How a run began and ended, in the words and numbers that the user sees."""

from __future__ import annotations

import math
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hvd_train import remote_url
from hvd_train.config import Config
from hvd_train.goals import headline, reason_to_end
from hvd_train.job import Job
from hvd_train.plugin import OWN, is_reference
from hvd_train.progress.figures import Shown
from hvd_train.run_files.records import Ending
from hvd_train.validate import Scores


@dataclass(frozen=True)
class Result:
    """How a training ended. Scores are the task's figures by name."""

    run_dir: Path | None
    finished: bool
    saved: bool
    """Whether the last commit, the weights and the summary are on disk; the same on all ranks."""
    stopped_by: int | None
    """The number of the signal that stopped it, on whichever rank; None where no signal did."""
    epochs: int
    """Whole ones."""
    epoch_share: float
    """The share of the next epoch that is done, 0 to 1."""
    steps: int
    scores: Mapping[str, float]
    """Those of the last evaluation; NaN without one."""
    best: float
    """The value of `headline`'s last figure in the best evaluation; NaN without one."""
    best_epoch: int | None
    test: Mapping[str, float]
    """Those of the best weights on the test set; NaN where there is none."""
    unit: str
    """What people call several samples: images, or samples."""
    headline: tuple[Shown, ...]
    """The figures to show where there is room for few: the loss, and the one that decides."""
    why: str
    """Why nothing more is to be trained: the last epoch is done, or an aim was reached before it; else empty."""
    images_per_second: float
    world_size: int
    seconds: float
    """Those of this process."""
    total_seconds: float
    """Those that were spent on training over all starts."""
    peaks: Mapping[str, float]
    """The bytes of memory that a rank held at most in this start: `peak_memory`, and `peak_gpu_memory` of a GPU."""


def describe(job: Job) -> str:
    """Return one line about what is going to be trained, on what, and how a step is cut."""
    config, training, place = job.config, job.state, job.world.place
    cut, parameters = training.cut, sum(p.numel() for p in training.model.parameters())
    slots = cut.num_slots(cut.global_batch)
    known = f"{job.parts.train_loader.num_samples:,} {job.parts.unit}"
    what, data = (
        (config.recipe, known) if config.is_of_program else (config.model.model, f"{config.data.data} ({known})")
    )
    line = (
        f"{what} ({parameters / 1e6:.2f} M parameters) on {data}, {ranks(place.size)} on {job.parts.device.type}, "
        f"{cut.global_batch} {job.parts.unit} a step in {counted(slots, 'slot')} of {cut.micro_batch}"
    )
    if slots < place.size:
        line += f"; {ranks(place.size - slots)} of {place.size} idle (a new run may have smaller slots: --batch-size)"
    elif slots % place.size:
        line += f"; {slots} slots do not divide over {ranks(place.size)}: some idle in part of each step"
    if training.progress.step:
        line += f"; going on at epoch {training.progress.epoch + 1}, step {training.progress.step}"
    return line


def summary(result: Result, config: Config) -> dict[str, Any]:
    """Return the contents of summary.json; numbers that are not known are None."""
    values: dict[str, Any] = {}
    for name, value in vars(result).items():
        if name in ("scores", "peaks"):
            values |= value
        elif name == "test":
            values |= {f"test_{figure}": number for figure, number in value.items()}
        elif name == "best":
            values[f"best_{result.headline[-1].name}"] = value
        elif name not in ("headline", "unit"):
            values[name] = value
    known = {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in values.items()}
    return {
        **known,
        "run_dir": remote_url.url_of(config.run.output_dir or "") or str(result.run_dir),
        "recipe": config.recipe,
        "torch": torch.__version__,
    }


def last_numbers(result: Result) -> Ending:
    """Return how a training has ended, with the numbers that stand for the whole run, where they are known."""
    scores = {f"best/{result.headline[-1].name}": result.best, "best/epoch": result.best_epoch or math.nan}
    scores |= {f"test/{name}": value for name, value in result.test.items()}
    known = {name: value for name, value in scores.items() if not math.isnan(value)}
    return Ending("finished", known) if result.finished else Ending("stopped")


def ending(result: Result, config: Config, *, stopped: str = "its launcher", copied: bool = True) -> str:
    """Return the last lines that a run prints; `stopped` says what has stopped it, if no signal has.

    Unless all is `copied`, what could not be written is in the run's working folder, but not at its URL.
    """
    url = remote_url.url_of(config.run.output_dir or "")
    if not result.finished:
        name = signal.Signals(result.stopped_by).name if result.stopped_by else stopped
        if not copied:
            return f"stopped by {name} at step {result.steps}, committed on this machine alone (see above)"
        if not result.saved:
            return f"stopped by {name} at step {result.steps}, NOT committed (see above)"
        tested = _words(result.headline, result.test, "test ")
        best = f"\nthe best weights so far: {', '.join(tested)}" if tested else ""
        return f"stopped by {name} at step {result.steps}, committed; the same command goes on from there{best}"
    reached = f" after {result.epochs + result.epoch_share:.2f} epochs" if result.epoch_share else ""
    names = config.model.model, config.data.data, config.task.task
    trust = " --trust" if any(map(is_reference, names)) else ""
    lost = "" if result.saved else "\nNOT all files could be written (see above)"
    return (
        f"{result.why}{reached}: {_scores(result)}{result.images_per_second:,.0f} {result.unit}/s "
        f"on {ranks(result.world_size)}, {result.seconds:.0f} s\n"
        f"files: {f'{url} (worked on in {result.run_dir})' if url else result.run_dir}"
        # What only a script knows can be evaluated from there alone.
        + ("" if OWN in names else f"\nnext:  hvd-train evaluate {shlex.quote(url or str(result.run_dir))}{trust}")
        + lost
    )


def _scores(result: Result) -> str:
    """Return the scores in words, each with a comma after it; those that are not known are left out."""
    figure, score = result.headline[-1], ""
    if not math.isnan(last := result.scores[figure.name]):
        best = f" (best {figure.written(result.best)}, epoch {result.best_epoch})" if result.best_epoch else ""
        score = f"{figure.title} {figure.written(last)}{best}, "
    return score + "".join(f"{text}, " for text in _words(result.headline, result.test, "test "))


def _words(figures: Sequence[Shown], values: Mapping[str, float], before: str) -> list[str]:
    """Return those figures whose values are known in words, each with the same text before it."""
    known = [(figure, values[figure.name]) for figure in figures if not math.isnan(values[figure.name])]
    return [f"{before}{figure.title} {figure.written(value)}" for figure, value in known]


def result_of(
    job: Job,
    *,
    finished: bool,
    stopped_by: int | None,
    saved: bool,
    last: Scores | None,
    test: Scores | None,
    peaks: Mapping[str, float],
) -> Result:
    """Return the result of a job whose loop has ended.

    `saved` says whether all files could be written, `last` holds the scores of weights in the middle of an epoch, and
    `test` those on the test set; `peaks` are those of all ranks.
    """
    best, progress = job.state.best, job.state.progress
    evaluated = last.values if last else job.state.last.scores if job.state.last else None
    task = job.parts.meter.task
    of_none = {figure.name: math.nan for figure in task.all_figures}
    shown = tuple(figure.as_shown() for figure in headline(job.config.schedule, task))
    return Result(
        run_dir=job.output.path,
        finished=finished,
        saved=saved,
        stopped_by=stopped_by,
        epochs=progress.epoch,
        epoch_share=progress.cursor / job.parts.train_loader.num_samples,
        steps=progress.step,
        scores=evaluated or of_none,
        best=best.scores[shown[-1].name] if best else math.nan,
        best_epoch=best.epoch if best else None,
        test=test.values if test else of_none,
        unit=job.parts.unit,
        headline=shown,
        why=reason_to_end(job.config, task, job.state) or "",
        images_per_second=job.clocks.stopwatch.images_per_second,
        world_size=job.world.place.size,
        seconds=time.perf_counter() - job.clocks.started,
        total_seconds=job.state.spent.total,
        peaks=peaks,
    )


def ranks(count: int) -> str:
    """Return a number of ranks in words: `1 rank`, `2 ranks`."""
    return counted(count, "rank")


def counted(count: int, noun: str) -> str:
    """Return a number of things in words, as in `1 slot` and `2 slots`."""
    return f"{count} {noun}{'s' if count != 1 else ''}"
