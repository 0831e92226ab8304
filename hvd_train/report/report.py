"""`hvd-train report`: one page about one run or many, made from their folders alone.

The sections come from `overview`, `timeline`, `scaling` and `confusion`. Each has a place for every run and says why
where it has nothing to show.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from markupsafe import Markup

from hvd_train import plain_file
from hvd_train._version import __version__
from hvd_train.config import free_fields
from hvd_train.console import say
from hvd_train.errors import UsageError
from hvd_train.progress.figures import OF_CLASSES, Shown
from hvd_train.report import confusion, overview, page, scaling, timeline
from hvd_train.report.confusion import Outcome
from hvd_train.report.scaling import Scaling
from hvd_train.run_files import durable, run_folder
from hvd_train.run_files.history import History, read_run

_SHORT = 9  # letters of a name that leave a chart its room; where one is longer, charts call the runs A, B, C


_MOST_IN_NAME = 4  # settings
_ABBREVIATED = {"learning_rate": "lr", "global_batch_size": "batch"}
_ALONE = ("model", "data", "optimizer", "schedule", "precision")


def open_all(paths: Sequence[Path]) -> tuple[list[History], list[Scaling]]:
    """Read these folders and return the runs and the measured scalings among them.

    A folder that holds run folders, as a sweep does, stands for these. Of several paths those that are neither are left
    out, with a note. Raises UsageError where no path is either, where one does not exist, and for a scaling that cannot
    be read.
    """
    runs, scalings = [], []
    paths = [inner for path in paths for inner in ([] if _is_scaling(path) else run_folder.runs_in(path)) or [path]]
    for path in paths:
        if _is_scaling(path):
            scalings.append(scaling.read(path))
            continue
        try:
            runs.append(read_run(path))
        except UsageError as error:
            if len(paths) == 1 or not path.exists():
                raise
            say(f"left out: {error}")
    if not runs and not scalings:
        raise UsageError("none of these is a run folder; name at least one, as in hvd-train report runs/*")
    return runs, scalings


def _is_scaling(path: Path) -> bool:
    return (path / scaling.RECORD).is_file()


def check_output(path: Path) -> None:
    """Raise UsageError where a report cannot be written, or would replace a file that is no report."""
    if path.is_dir():
        raise UsageError(f"--output {path} is a folder; name a file in it, as in {path / 'report.html'}")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"--output {path}: no folder {path.parent} that can be written to")
    if path.exists():
        try:
            with plain_file.opened(path) as file:
                ours = page.GENERATOR.encode() in file.read(1000)
        except OSError as error:
            raise UsageError(f"--output {path}: {error.strerror}") from None
        if not ours:
            raise UsageError(f"--output {path} is there and not a report of ours; name another file, or remove it")


def write(path: Path, text: str) -> None:
    """Write the page, whole or not at all. Raises UsageError where it cannot be written."""
    try:
        durable.write_text(path, text)
    except OSError as error:
        raise UsageError(f"--output {path}: {error.strerror}") from None


def compose(
    runs: Sequence[History],
    scalings: Sequence[Scaling],
    predictions: Mapping[Path, Outcome],
    now: datetime,
) -> str:
    """Return the page. `predictions` has those of each run by its path, or a text that says why there are none."""
    runs, many = ordered(runs), len(runs) > page.MANY
    names = by_settings(runs) if many else labels(runs)
    short = max(map(len, names), default=0) <= _SHORT
    keys = names if short else [_letter(index) for index in range(len(runs))]
    if len(runs) > 1 and not short:
        names = [f"{key}  {name}" for key, name in zip(keys, names, strict=True)]
    sections = []
    if runs:
        sections += [
            (
                "Summary",
                (page.paragraph(_order_in_words(runs)) if many else Markup()) + overview.summary(runs, names),
            ),
            ("Learning curves", timeline.learning(runs, names, keys)),
            ("Throughput", timeline.throughput(runs, names, keys)),
            ("Where the time goes", timeline.phases(runs, names)),
        ]
    sections.append(("Scaling", scaling.section(scalings)))
    if runs:
        sections += [
            ("Predictions", confusion.section(runs, names, predictions)),
            ("Configuration", overview.configuration(runs, names)),
            ("What happened", timeline.events(runs, names)),
            ("Environment", overview.environment(runs, names)),
        ]
    subjects = [runs[0].name] if len(runs) == 1 else [f"{len(runs)} runs"] if runs else []
    subjects += [f"scaling of {measured.path.resolve().name}" for measured in scalings]
    made = f"made {now:%Y-%m-%d %H:%M} by hvd-train {__version__}"
    return page.document(f"Training report: {', '.join(subjects)}", made, sections)


def ordered(runs: Sequence[History]) -> Sequence[History]:
    """Return the runs in the order of the page: as they were named or, if they are many, the best first.

    What is best goes by one figure, which all of them have.
    """
    figure = _common_figure(runs)
    if len(runs) <= page.MANY or figure is None:
        return runs
    return sorted(runs, key=lambda run: overview.best_score(run, figure), reverse=True)


def _common_figure(runs: Sequence[History]) -> Shown | None:
    """Return top-1 where all runs have it, else the figure by which all of them have their best weights, or None."""
    top1 = OF_CLASSES[1]
    if all(top1 in run.figures for run in runs):
        return top1
    return runs[0].best if len({run.best for run in runs}) == 1 else None


def _order_in_words(runs: Sequence[History]) -> str:
    figure = _common_figure(runs)
    if figure is None:
        return "The runs have no figure in common: they come as they were named."
    return f"The best validation {figure.title} comes first."


def labels(runs: Sequence[History]) -> list[str]:
    """Return a name for each run that no other one has, without what all of them begin with."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.path) for run in runs]
    first, last = min(names, default=""), max(names, default="")  # what these two begin with, all do
    same = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    cut = max(first[:same].rfind(sign) for sign in "-_/. ") + 1
    if cut > 3 and min(map(len, names)) > cut:
        names = [f"…{name[cut:]}" for name in names]
    return _told_apart(names)


def by_settings(runs: Sequence[History]) -> list[str]:
    """Return a name for each run that no other one has, made of the settings in which they differ.

    Where they differ in none, it is that of `labels`.
    """
    free = free_fields()
    settings = [{key: page.written(value) for key, value in run.settings.items() if key not in free} for run in runs]
    keys = dict.fromkeys(key for of_run in settings for key in of_run)
    differing = [key for key in keys if len({of_run.get(key) for of_run in settings}) > 1][:_MOST_IN_NAME]
    if not differing:
        return labels(runs)
    return _told_apart([", ".join(_setting(key, of_run.get(key)) for key in differing) for of_run in settings])


def _setting(key: str, value: str | None) -> str:
    """Write a setting in a name: `lr 0.1`, `seed 3`, and of those whose value says what it is, the value alone."""
    if key in _ALONE and value is not None:
        return value
    return f"{_ABBREVIATED.get(key, key.replace('_', ' '))} {'unknown' if value is None else value}"


def _told_apart(names: Sequence[str]) -> list[str]:
    return [name if names.count(name) == 1 else f"{number} {name}" for number, name in enumerate(names, 1)]


def _letter(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else str(index + 1)
