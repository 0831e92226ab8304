"""`hvd-train report`: one page about one run or many, made from their folders alone.

The sections come from `overview`, `timeline`, `scaling` and `confusion`. Each has a place for every run and says why
where it has nothing to show.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from hvd_train import plain_file
from hvd_train._version import __version__
from hvd_train.errors import UsageError
from hvd_train.report import confusion, overview, page, scaling, timeline
from hvd_train.report.confusion import Predictions
from hvd_train.report.scaling import Scaling
from hvd_train.run_files import durable
from hvd_train.run_files.history import History, read

_SHORT = 9  # letters of a name that leave a chart its room; where one is longer, charts call the runs A, B, C


def open_all(paths: Sequence[Path]) -> tuple[list[History], list[Scaling]]:
    """Read these folders and return the runs and the measured scalings among them.

    Raises UsageError for a folder that is neither, and for a scaling that cannot be read.
    """
    scalings = [scaling.read(path) for path in paths if (path / scaling.RECORD).is_file()]
    return [read(path) for path in paths if not (path / scaling.RECORD).is_file()], scalings


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
    predictions: Mapping[Path, Predictions | str],
    now: datetime,
) -> str:
    """Return the page. `predictions` has those of each run by its path, or a text that says why there are none."""
    names = labels(runs)
    short = max(map(len, names), default=0) <= _SHORT
    keys = names if short else [_letter(index) for index in range(len(runs))]
    if len(runs) > 1 and not short:
        names = [f"{key}  {name}" for key, name in zip(keys, names, strict=True)]
    sections = []
    if runs:
        sections += [
            ("Summary", overview.summary(runs, names)),
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
    return [name if names.count(name) == 1 else f"{number} {name}" for number, name in enumerate(names, 1)]


def _letter(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else str(index + 1)
