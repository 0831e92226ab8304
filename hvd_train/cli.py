"""`hvd-train COMMAND`: run a command, print its error and exit, which happens only here."""

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
    """A module of `hvd_train.commands`, which imports neither torch nor Horovod at first."""

    USAGE: str
    """The command's lines of the overview."""
    run: Callable[[list[str]], int]
    """Runs the command with the arguments after its name and returns the exit code; may raise HvdTrainError."""


def main() -> None:
    """Run the command of `sys.argv` and exit with its code; this is the console entry point."""
    rank_log.whole_lines()
    codes: list[int] = []
    atexit.register(_leave, codes)  # registered first, so it runs last
    with last_word.exit_code_told(os.environ):
        codes.append(run(sys.argv[1:]))
        sys.exit(codes[0])


def _leave(codes: list[int]) -> None:
    """End the process without taking the interpreter and torch apart, unless an unexpected error left `codes` empty.

    That takes a second or two, in which a launcher waits for its ranks and a signal would spoil the exit code.
    """
    if codes:
        mpi = sys.modules.get("mpi4py.MPI")
        # To mpirun a process that ends without Finalize has failed. With finalize=False another library calls it.
        if mpi and sys.modules["mpi4py"].rc.finalize is not False and mpi.Is_initialized() and not mpi.Is_finalized():
            mpi.Finalize()
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(codes[0])


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code; print an error once for all ranks.

    An HvdTrainError is one line on stderr. The driver of an elastic job prints other errors; else they are raised.
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
    """Return the text of `hvd-train --help`: the usage of every command, in order."""
    usages = "".join(command(name).USAGE for name in COMMANDS)
    return f"""usage: {PROGRAM} COMMAND ...

{usages}  --version                {__version__}

`{PROGRAM} COMMAND --help` lists the flags. On several ranks: horovodrun -np 2 {PROGRAM} train
"""
