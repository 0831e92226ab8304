"""`hvd-train COMMAND`: run a command, print its error and exit, which happens only here."""

import atexit
import errno
import importlib
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress

from hvd_train.commands import tree
from hvd_train.console import PROGRAM, failed, outlive, say
from hvd_train.errors import HvdTrainError, UsageError
from hvd_train.launch import exit_report, launcher
from hvd_train.launch.exit_report import report_once


def main() -> None:
    """Run the command of `sys.argv` and exit with its code; this is the console entry point."""
    outlive()  # `hvd-train bench ... | head`
    codes: list[int] = []
    atexit.register(_leave, codes)  # registered first, so it runs last
    with exit_report.reporting_exit_code():
        codes.append(run(sys.argv[1:]))
        if failed and failed[0].errno == errno.ENOSPC and codes == [0] and sys.argv[1] != "train":
            say("the disk of the output is full")
            codes[0] = os.EX_IOERR
        sys.exit(codes[0])


def _leave(codes: list[int]) -> None:
    """End the process at once: torch takes a second to end, in which a signal
    would spoil the exit code.
    """
    if codes:
        mpi = sys.modules.get("mpi4py.MPI")
        # To mpirun a process that ends without Finalize has failed. With finalize=False another
        # library calls it.
        if (
            mpi
            and sys.modules["mpi4py"].rc.finalize is not False
            and mpi.Is_initialized()
            and not mpi.Is_finalized()
        ):
            mpi.Finalize()
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(codes[0])


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code; print an error once for all ranks.

    An HvdTrainError is one line on stderr. Of other errors the traceback is printed, in an elastic
    job by the driver.
    """
    try:
        options = tree.read(arguments)
        if options.name == "train" and (options.np or options.hosts):
            arguments = _long_form(options)
            options = tree.read(arguments)
        launcher.refuse_others(
            os.environ, [PROGRAM, *arguments], alone=options.name not in tree.RANKED
        )
        module, _, function = options.function.partition(".")
        command = getattr(importlib.import_module(f"hvd_train.commands.{module}"), function)
        return int(command(options))
    except HvdTrainError as error:
        report_once(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:  # noqa: BLE001  # the user's code may raise anything
        is_sent = exit_report.send(error)
        if not is_sent and exit_report.is_printed_here(error):
            print(exit_report.described(error), file=sys.stderr)
        return 1


def _long_form(options: Namespace) -> list[str]:
    """Return `train --np 2 ...` as the `launch` command for which it is short.

    Raises UsageError under a launcher.
    """
    short = ["--np", str(options.np)] if options.np else []
    short += ["--hosts", options.hosts] if options.hosts else []
    if launched := launcher.launched(os.environ):
        raise UsageError(f"{launched.launcher} has started the ranks: leave out {' '.join(short)}")
    rest = tree.without(options.typed, ("--np", "-np"), ("--hosts", "-H"))
    return ["launch", *short, "--", "train", *rest]
