"""Send the exit report of a worker to the driver of its elastic job: its exit code and its error.

No torch.

It counts if the process's own exit code is useless: a signal killed it, its ssh failed, or a
library crashed at exit.
"""

import atexit
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Literal

from hvd_train.console import say
from hvd_train.errors import HvdTrainError, RankDiffers, RankLost, in_user_code, place_of
from hvd_train.launch import cause, launcher
from hvd_train.launch.workers import WORKER

_ANSWER_S = 2.0
_LAUNCHER_SECONDS = 10.0  # ranks of one host can be seconds apart while they import
# "training": after the ranks synchronized the state; "ended": after the final files, perhaps in
# code of the user.
During = Literal["building", "rendezvous", "training", "ended"]


@dataclass(frozen=True)
class ExitReport:
    """The exit report of a worker."""

    exit_code: int  # of the process, unless it crashes in the exit handlers of its libraries
    error: str = ""  # a line for the user, or a traceback; empty if there is no error to print
    during: During = "building"
    step: int = 0  # finished steps
    avoids_host: bool = False  # which may compute wrongly


def _put(report: ExitReport | None) -> bool:
    with suppress(OSError):
        if worker := os.environ.get(WORKER):
            from hvd_train.launch import client  # slow to import

            text = json.dumps(report and asdict(report))
            client.put(os.environ, f"exit_report/{worker}", text, _ANSWER_S)
            return True
    return False


# the error that ends this process, or the end of its training, once the driver has it
_sent: list[object] = []


def described(error: BaseException) -> str:
    """Return the traceback of an error; of one in the user's code, from its first frame
    on, and with the last place there if other code was called from it.
    """
    frames, place = in_user_code(error)
    if not frames:
        return "".join(traceback.format_exception(error)).rstrip()
    # without the lines that mark the columns
    plain = [traceback.FrameSummary(f.filename, f.lineno, f.name, line=f.line) for f in frames]
    shown = "".join([*traceback.format_list(plain), *traceback.format_exception_only(error)])
    text = f"Traceback (most recent call last, from your code on):\n{shown}"
    return text.rstrip() if place_of(frames[-1]) == place else f"{text}Called in {place}"


def send(error: Exception, during: During = "building", step: int = 0) -> bool:
    """Send the error that ends this process to our driver, once; return False if
    this process must print it.
    """
    if error in _sent:
        return True
    is_ours = isinstance(error, HvdTrainError)
    text = str(error) if is_ours else described(error)
    avoids_host = isinstance(error, RankDiffers)
    report = ExitReport(getattr(error, "exit_code", 1), text, during, step, avoids_host)
    if not _put(report):
        return False
    _sent[:] = [error]
    return True


def training_ended(exit_code: int, step: int, *, is_last: bool) -> None:
    """Report that the training has ended, so that whatever ends this process later changes nothing.

    A program with several trainings reports it as the interpreter ends.
    """
    report = ExitReport(exit_code, during="ended", step=step)
    if not is_last:
        atexit.register(_put, report)
    elif _put(report):
        _sent[:] = [report]


def training_begins() -> None:
    """Withdraw the report of an earlier training of this program."""
    atexit.unregister(_put)
    _sent.clear()
    _put(None)


@contextmanager
def reporting_exit_code() -> Iterator[None]:
    """Send the exit code to our driver if an error ends the block and the
    driver has no report yet.
    """
    try:
        yield
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if not _sent:
            _put(ExitReport(0 if code is None else code if isinstance(code, int) else 1))
        raise


def report_once(error: HvdTrainError) -> None:
    """Print an error once for all ranks: by rank 0, or by the one rank that raised
    it, with that rank's name.

    A launcher ends all ranks when the first one ends. So other ranks wait for that, and print the
    error only if it does not happen. In an elastic job the driver prints it.
    """
    if send(error):
        return
    launched = launcher.launched(os.environ)
    if isinstance(error, RankLost):
        killed = cause.killed_for_memory()
        if killed and cause.is_first_on_host(os.environ, killed):
            say(killed)
    if launched is None or (launched.rank == 0 and error.raised_by is None):
        say(str(error))
        if launched and isinstance(error, RankLost):
            _ended_by_launcher(error)
    elif error.raised_by is not None or not _ended_by_launcher(error):
        say(f"rank {launched.rank} on {socket.gethostname()}: {error}")


def is_printed_here(error: BaseException) -> bool:
    """Return whether this process prints the traceback of an error: neither our driver nor
    another rank of this host does.
    """
    return error not in _sent and cause.is_first_on_host(os.environ, described(error))


def report_in_one_line() -> None:
    """Let an uncaught error of this package end a script with one line and its exit
    code, as it ends `hvd-train`; print a traceback once a host.
    """
    before = sys.excepthook
    if getattr(before, "_of_hvd_train", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # else it would end the user's shell
        if isinstance(error, HvdTrainError) and not hasattr(sys, "ps1"):
            report_once(error)
            raise SystemExit(error.exit_code)
        if before is not sys.__excepthook__ or launcher.launched(os.environ) is None:
            before(kind, error, trace)
        elif is_printed_here(error):
            print(described(error), file=sys.stderr)

    hook._of_hvd_train = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _ended_by_launcher(error: HvdTrainError) -> bool:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    return (
        error.asked_to_end or signal.sigtimedwait({signal.SIGTERM}, _LAUNCHER_SECONDS) is not None
    )
