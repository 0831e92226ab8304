"""`hvd-train report`: one HTML page about one run or many."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from hvd_train import remote_url
from hvd_train.console import PROGRAM, say, show
from hvd_train.errors import UsageError
from hvd_train.flags import parse_flags
from hvd_train.help_page import Page, page_of
from hvd_train.plugin import Untrusted
from hvd_train.run_files import remote, run_folder

if TYPE_CHECKING:
    from hvd_train.report.confusion import Outcome

USAGE = """\
  report [RUN ...]         one page about runs: curves, speed, predictions
"""


@dataclass(frozen=True)
class ReportOptions:
    """Write one HTML page about one run or many: what they reached, and how they differ.

    It opens anywhere, without a network.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Run folders, and folders with runs in them, as those of a sweep; a folder of `bench scaling` brings its table and
    plots; default: the newest run."""
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
    from hvd_train.report import report  # imports matplotlib

    report.check_output(options.output)
    with TemporaryDirectory(prefix="hvd_train-") as folder:
        paths = [_here(path, Path(folder, str(number))) for number, path in enumerate(options.runs)]
        runs, scalings = report.open_all(paths or (run_folder.newest(),))
        untrusted: list[Untrusted] = []
        predictions: dict[Path, Outcome] = {
            run.path: _predicted(run.path, options, untrusted) if options.predictions else "left out: --no-predictions"
            for run in runs
        }
        if untrusted:
            others = f" ({len(untrusted) - 1} more runs do so, too)" if len(untrusted) > 1 else ""
            say(f"no predictions: {untrusted[0]}{others}")
        report.write(options.output, report.compose(runs, scalings, predictions, datetime.now()))
    show(f"report: {options.output}")
    return 0


def page(arguments: list[str]) -> Page:
    """Return the help."""
    examples = ("hvd-train report runs/* --output report.html",)
    return page_of(ReportOptions, "report [RUN ...] [FLAGS]", examples, "RUN ...")


def _here(path: Path, folder: Path) -> Path:
    """Return a run folder of this machine: the path itself, or a copy in `folder` of what is at its URL."""
    url = remote_url.url_of(path)
    if url is None:
        return path
    remote.check(url, "")
    copy = folder / remote_url.name_of(url)
    copy.mkdir(parents=True)
    remote.fetch_newest(url, copy, lambda name: not name.startswith("checkpoints/"), say)
    return copy


def _predicted(run: Path, options: ReportOptions, untrusted: list[Untrusted]) -> Outcome:
    """Return a run's predictions, or why there are none: a page is worth having without them.

    An error about code that is not trusted is added to `untrusted`.
    """
    from hvd_train.report.predictions import predict  # imports torch

    try:
        return predict(run, options.device, trust=options.trust)
    except Untrusted as error:
        untrusted.append(error)
        return f"no predictions: {error}"
    except UsageError as error:
        return f"no predictions: {error}"
