"""`hvd-train watch`: the state of a training, in the terminal."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from hvd_train.console import PROGRAM
from hvd_train.errors import UsageError
from hvd_train.flags import parse_flags

USAGE = "  watch RUN [--once]       the state of a running or finished training, in the terminal\n"


@dataclass(frozen=True)
class WatchOptions:
    """Show a running or finished training, read from its files; this ends when the run has ended."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder."""
    once: bool = False
    """Print the state now and end; this is the default without a terminal."""
    interval: float = 1.0
    """Seconds between updates."""


def run(arguments: list[str]) -> int:
    """Show the run until it ends, or once, and return 0. Raises UsageError if there is no run to show."""
    options = parse_flags(WatchOptions, arguments, f"{PROGRAM} watch")
    if not options.interval > 0:
        raise UsageError(f"--interval {options.interval:g}: it must be a number of seconds above 0")
    from hvd_train.report import watch

    watch.watch(options.run, once=options.once or not sys.stdout.isatty(), interval_s=options.interval)
    return 0
