"""`hvd-train COMMAND`: run a command, print its error and exit, which happens only here."""

import atexit
import errno
import importlib
import os
import signal
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress

from hvd_train import recipes
from hvd_train._version import __version__
from hvd_train.commands.names import COMMANDS, RANKED
from hvd_train.console import PROGRAM, failed, outlive, say
from hvd_train.errors import HvdTrainError, Parser, UsageError, unknown_name
from hvd_train.launch import exit_report, launcher
from hvd_train.launch.exit_report import report_once


def main() -> None:
    """Run the command of `sys.argv` and exit with its code; this is the console entry point."""
    outlive()  # `hvd-train bench ... | head`
    codes: list[int] = []
    atexit.register(_leave, codes)  # registered first, so it runs last
    with exit_report.reporting_exit_code(os.environ):
        codes.append(run(sys.argv[1:]))
        if failed and failed[0].errno == errno.ENOSPC and codes == [0] and sys.argv[1] != "train":
            say("the disk of the output is full")
            codes[0] = os.EX_IOERR
        sys.exit(codes[0])


def _leave(codes: list[int]) -> None:
    """End the process at once: torch takes a second to end, in which a signal would spoil the exit code."""
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

    An HvdTrainError is one line on stderr. Of other errors the traceback is printed, in an elastic job by the driver.
    """
    try:
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            print(overview(), end="")
            return 0 if arguments else 2
        if arguments[0] == "--version":
            print(f"{PROGRAM} {__version__}")
            return 0
        if arguments[0] in recipes.RECIPES or arguments[0].startswith("-"):
            raise UsageError(f"name the command first: {PROGRAM} train {' '.join(arguments)}")
        if arguments[0] not in COMMANDS:
            raise unknown_name("command", arguments[0], COMMANDS)
        arguments = _long_form(arguments)
        launcher.refuse_others(os.environ, [PROGRAM, *arguments], alone=arguments[0] not in RANKED)
        module = importlib.import_module(f"hvd_train.commands.{COMMANDS[arguments[0]][0]}")
        return int(getattr(module, arguments[0].replace("-", "_"))(list(arguments[1:])))
    except HvdTrainError as error:
        report_once(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:  # noqa: BLE001  # the user's code may raise anything
        if not exit_report.send(os.environ, error):
            print(exit_report.described(error), file=sys.stderr)
        return 1


def _long_form(arguments: Sequence[str]) -> Sequence[str]:
    """Return `train --np 2 ...` as the `launch` command for which it is short. Raises UsageError under a launcher."""
    parser = Parser(add_help=False)
    parser.add_argument("--np", "-np", dest="--np")
    parser.add_argument("--hosts", "-H", dest="--hosts")
    options, rest = parser.parse_known_args(arguments)
    short = [word for option in vars(options).items() if option[1] for word in option]
    if not short or rest[0] != "train":
        return arguments
    if launched := launcher.launched(os.environ):
        raise UsageError(f"{launched.launcher} has started the ranks: leave out {' '.join(short)}")
    return ["launch", *short, "--", *rest]


def overview() -> str:
    """Return the text of `hvd-train --help`."""
    lines = [f"usage: {PROGRAM} COMMAND ...", ""]
    for name, (_, usage, about) in COMMANDS.items():
        begin, *texts = f"  {name} {usage}", *textwrap.wrap(about, 52)
        lines += [begin] if len(begin) > 26 else [f"{begin:<27}{texts.pop(0)}"]
        lines += [f"{'':27}{text}" for text in texts]
    names = textwrap.wrap(f"Recipes: {', '.join(recipes.RECIPES)}.", 79, break_on_hyphens=False)
    return "\n".join([*lines, "", *names, f"`{PROGRAM} COMMAND --help` lists the flags. Version {__version__}", ""])
