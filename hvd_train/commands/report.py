"""`hvd-train report`: one HTML page about one run or many."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from hvd_train.console import PROGRAM, say, show
from hvd_train.errors import UsageError
from hvd_train.flags import parse_flags
from hvd_train.plugin import Untrusted

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
    """Where the models run for the predictions."""
    trust: bool = False
    """Import the code that a run names as its model or data: it can do here whatever you can."""


def run(arguments: list[str]) -> int:
    """Write the page, print its path and return 0. Raises UsageError for folders or an output that cannot be used."""
    options = parse_flags(ReportOptions, arguments, f"{PROGRAM} report")
    if not options.runs:
        raise UsageError("which runs? name at least one run folder, as in hvd-train report runs/*")
    from hvd_train.report import report  # imports matplotlib

    report.check_output(options.output)
    runs, scalings = report.open_all(options.runs)
    predictions: dict[Path, Predictions | str] = {
        run.path: _predicted(run.path, options.device, trust=options.trust)
        if options.predictions
        else "left out: --no-predictions"
        for run in runs
    }
    report.write(options.output, report.compose(runs, scalings, predictions, datetime.now()))
    show(f"report: {options.output}")
    return 0


def _predicted(run: Path, device: str, *, trust: bool) -> Predictions | str:
    """Return a run's predictions, or why there are none: a page is worth having without them."""
    from hvd_train.report.predictions import predict  # imports torch

    try:
        return predict(run, device, trust=trust)
    except Untrusted as error:
        say(f"no predictions: {error}")
        return f"no predictions: {error}"
    except UsageError as error:
        return f"no predictions: {error}"
