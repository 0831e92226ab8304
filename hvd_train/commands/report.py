"""`hvd-train report`: one HTML page about one run or many."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from hvd_train import plain_file
from hvd_train.console import PROGRAM, say, show
from hvd_train.errors import UsageError
from hvd_train.flags import parse_flags
from hvd_train.plugin import Untrusted
from hvd_train.run_files import durable

if TYPE_CHECKING:
    from hvd_train.report.confusion import Predictions

USAGE = """\
  report RUN [RUN ...] [--output FILE.html] [--no-predictions] [--trust]
                           one page about runs: curves, throughput, differences, predictions; opens anywhere
"""


@dataclass(frozen=True)
class ReportOptions:
    """Write one HTML page, complete in itself, about one run or many: what they reached, and how they differ."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run folders; a folder of `bench scaling` brings its table and plots."""
    output: Path = Path("report.html")
    """File of the page; an earlier report of this name is replaced, no other file is."""
    predictions: bool = True
    """Compute the confusion matrix and the worst images from the best weights (needs torch and the data)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the models for the predictions."""
    trust: bool = False
    """Import the code that a run names as its model or data: it gets all of your permissions."""


def run(arguments: list[str]) -> int:
    """Write the page, print its path and return 0. Raises UsageError if a folder or the output cannot be used."""
    options = parse_flags(ReportOptions, arguments, f"{PROGRAM} report")
    if not options.runs:
        raise UsageError("which runs? name at least one run folder, as in hvd-train report runs/*")
    from hvd_train.report import report  # imports matplotlib

    _check_output(options.output)
    runs, scalings = report.open_all(options.runs)
    predictions: dict[Path, Predictions | str] = {run.path: "left out: --no-predictions" for run in runs}
    if options.predictions:
        predictions = {path: _predicted(path, options.device, trust=options.trust) for path in predictions}
    text = report.compose(runs, scalings, predictions, datetime.now())
    try:
        durable.write_text(options.output, text)
    except OSError as error:
        raise UsageError(f"--output {options.output}: {error.strerror}") from None
    show(f"report: {options.output}")
    return 0


def _check_output(path: Path) -> None:
    """Raise UsageError if a report cannot be written, or would replace a file that is no report."""
    if path.is_dir():
        raise UsageError(f"--output {path} is a folder; name a file in it, as in {path / 'report.html'}")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"--output {path}: no folder {path.parent} that can be written to")
    try:
        with plain_file.opened(path) as file:
            if b'content="hvd-train report"' not in file.read(1000):
                raise UsageError(f"--output {path} is no report of hvd-train; name another file, or delete it")
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UsageError(f"--output {path}: {error.strerror}") from None


def _predicted(run: Path, device: str, *, trust: bool) -> Predictions | str:
    from hvd_train.report.predictions import predict  # imports torch

    try:
        return predict(run, device, trust=trust)
    except UsageError as error:
        if isinstance(error, Untrusted):
            say(f"no predictions: {error}")
        return f"no predictions: {error}"
