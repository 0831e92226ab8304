"""`hvd-train watch`: the state of a training, in the terminal."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from hvd_train import remote_url
from hvd_train.console import PROGRAM
from hvd_train.errors import UsageError
from hvd_train.flags import parse_flags
from hvd_train.help_page import Page, page_of
from hvd_train.run_files import run_folder

USAGE = """\
  watch [RUN]              a running or finished training, in the terminal
"""


@dataclass(frozen=True)
class WatchOptions:
    """Show a running or finished training in the terminal, read from its files. It ends when the run has ended."""

    run: Annotated[Path | None, tyro.conf.Positional] = None
    """Run folder; default: the newest run."""
    once: bool = False
    """Print the present state and end, as always happens without a terminal."""
    interval: float = 1.0
    """Seconds between updates."""


def run(arguments: list[str]) -> int:
    """Show the run until it ends, or once, and return 0. Raises UsageError where there is no run to show."""
    options = parse_flags(WatchOptions, arguments, f"{PROGRAM} watch")
    if not options.interval > 0:
        raise UsageError(f"--interval {options.interval:g}: it must be a number of seconds above 0")
    if options.run is not None and (url := remote_url.url_of(options.run)):
        raise UsageError(
            f"{url} has whole commits, and no files that grow: type `{PROGRAM} report {url}`, or watch on the machine "
            "that trains the folder which its first lines name"
        )
    from hvd_train.report import watch

    watch.watch(
        options.run or run_folder.newest(), once=options.once or not sys.stdout.isatty(), interval_s=options.interval
    )
    return 0


def page(arguments: list[str]) -> Page:
    """Return the help."""
    examples = ("hvd-train watch runs/NAME",)
    return page_of(WatchOptions, "watch [RUN] [FLAGS]", examples, "RUN")
