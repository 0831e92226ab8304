"""The commands by their names. None is imported before it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Protocol, cast

from hvd_train.help_page import Page

COMMANDS = (
    *("train", "evaluate", "config", "audit", "show-data", "index", "sweep", "bench", "export", "predict"),
    *("tune", "report", "watch", "why", "hosts", "doctor", "completion"),
)


class Command(Protocol):
    """A module of `hvd_train.commands`. Importing one imports neither torch nor Horovod."""

    USAGE: str
    """The command's line of the overview: what it takes and what it does."""
    page: Callable[[list[str]], Page]
    """Returns the help of the command for the arguments after its name; may raise UsageError."""
    run: Callable[[list[str]], int]
    """Runs the command with the arguments after its name and returns the exit code; may raise HvdTrainError."""


def command(name: str) -> Command:
    """Import and return the module of a command; `name` is one of COMMANDS."""
    return cast(Command, importlib.import_module(f"hvd_train.commands.{name.replace('-', '_')}"))
