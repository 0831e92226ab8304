"""The front door, `hvd-train COMMAND`. The process exits only here, and only here errors become lines."""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol, cast

from hvd_train._version import __version__
from hvd_train.console import PROGRAM
from hvd_train.errors import HvdTrainError, unknown_name
from hvd_train.launch import last_word, launcher, rank_log
from hvd_train.launch.error_report import report_once

COMMANDS = (
    *("train", "evaluate", "config", "audit", "show-data", "sweep"),
    *("bench", "export", "report", "watch", "hosts", "doctor"),
)


class Command(Protocol):
    """A module of `hvd_train.commands`. Importing one imports neither torch nor Horovod."""

    USAGE: str
    """The command's lines of the overview: what it takes and what it does."""
    run: Callable[[list[str]], int]
    """Runs the command with the arguments after its name and returns the exit code; may raise HvdTrainError."""


def main() -> None:
    """Run the command that was typed and exit with its code; this is the console entry point."""
    rank_log.whole_lines()
    codes: list[int] = []
    atexit.register(_leave, codes)  # registered first, so it runs last
    with last_word.exit_code_told(os.environ):
        codes.append(run(sys.argv[1:]))
        sys.exit(codes[0])


def _leave(codes: list[int]) -> None:
    """End the process, which has done all that it had to do, without taking the interpreter and torch apart.

    That takes a second or two, in which a launcher waits for its ranks, and a signal would spoil the exit code. If
    `codes` is empty, the command raised an unexpected error, and the interpreter ends in its own way.
    """
    if codes:
        _finalize_mpi()
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(codes[0])


def _finalize_mpi() -> None:
    """Finalize MPI if a sweep or the user's own model has mpi4py do so when the interpreter ends.

    To mpirun a process that ends without it has failed.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or sys.modules["mpi4py"].rc.finalize is False:
        return  # the library that initialized MPI then finalizes it as well
    if mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code.

    An HvdTrainError becomes one line on stderr, once for all ranks. Any other error of an elastic job's worker is
    printed by the job's driver, once for all that meet it; elsewhere it is raised.
    """
    try:
        if not arguments or arguments[0] in ("-h", "--help"):
            print(overview(), end="")
            return 0 if arguments else 2
        if arguments[0] == "--version":
            print(f"{PROGRAM} {__version__}")
            return 0
        if arguments[0] not in COMMANDS:
            raise unknown_name("command", arguments[0], COMMANDS)
        if arguments[0] in ("train", "evaluate", "sweep", "bench"):
            launcher.refuse_others(os.environ, [PROGRAM, *arguments])
        return command(arguments[0]).run(list(arguments[1:]))
    except HvdTrainError as error:
        report_once(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        if not last_word.tell(os.environ, error):
            raise
        return 1


def command(name: str) -> Command:
    """Import and return the module of a command; `name` is one of COMMANDS."""
    return cast(Command, importlib.import_module(f"hvd_train.commands.{name.replace('-', '_')}"))


def overview() -> str:
    """Return what `hvd-train --help` prints: the usage of every command, in order."""
    usages = "".join(command(name).USAGE for name in COMMANDS)
    return f"""usage: {PROGRAM} COMMAND ...

{usages}  --version                {__version__}

`{PROGRAM} COMMAND --help` lists the flags. On several ranks: horovodrun -np 2 {PROGRAM} train
"""
