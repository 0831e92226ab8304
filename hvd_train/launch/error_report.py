"""An error that ends the job is printed once for all ranks, by the rank that knows it best; so is a note."""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback

from hvd_train import user_code
from hvd_train.console import say
from hvd_train.errors import GpuFailed, HvdTrainError, RankLost
from hvd_train.launch import last_word, launcher, roll_call
from hvd_train.launch.launcher import Launch

_LAUNCHER_SECONDS = 10.0  # ranks of one host can be seconds apart while they import
_SAME_ERROR_SECONDS = 3.0  # ranks that train are closer


def report_once(error: HvdTrainError, same_error_s: float = _SAME_ERROR_SECONDS) -> None:
    """Print an error once for all ranks: by rank 0, or by the one rank that raised it, with that rank's name.

    Of an error that is likely on all ranks, the others wait `same_error_s` whether rank 0 has it, too.

    A launcher ends all ranks when the first one ends, and takes over that one's exit code. So a rank that is not to
    speak for the job waits to be ended; if that does not happen, no other rank has spoken, and it speaks after all.
    The ranks of an elastic job wait for nothing: their driver prints it.
    """
    if error.reported or last_word.tell(os.environ, error):
        return
    launched = launcher.launched(os.environ)
    if launched is None:
        say(str(error))
    elif error.raised_by is not None:
        waits = error.likely_everywhere and launched.rank != 0
        if not (waits and _ended_by_launcher(error, same_error_s)):
            _say_with_name(launched, error)
    elif launched.rank == 0:
        say(str(error))
        if isinstance(error, RankLost) and not isinstance(error, GpuFailed):
            _ended_by_launcher(error)  # its report should name the rank that is lost
    elif not _ended_by_launcher(error):
        _say_with_name(launched, error)


def exit_for(error: Exception) -> None:
    """Exit for the error that ends a program, which is printed once for all ranks; do nothing in a process alone.

    Of an error of the program's own code there is the traceback without our frames, named by the rank.
    """
    launched = launcher.launched(os.environ)
    if launched is None and not launcher.elastic(os.environ):
        return
    code = error.exit_code if isinstance(error, HvdTrainError) else 1
    if not last_word.tell(os.environ, error):
        told = error
        if not isinstance(told, HvdTrainError):
            told = HvdTrainError(user_code.told(error) or "".join(traceback.format_exception(error)).rstrip())
            told.raised_by = launched.rank if launched else None
        told.likely_everywhere = True
        report_once(told, _LAUNCHER_SECONDS)  # the interpreter of rank 0 takes its time to end
    raise SystemExit(code) from None


def say_once(note: str) -> None:
    """Print a note that every rank has once for all of them."""
    launched = launcher.launched(os.environ)
    if launched is None or launched.rank == 0:
        say(note)


def _say_with_name(launched: Launch, error: HvdTrainError) -> None:
    say(f"rank {launched.rank} on {socket.gethostname()}: {error}")


def _ended_by_launcher(error: HvdTrainError, limit_s: float = _LAUNCHER_SECONDS) -> bool:
    """Wait some seconds for the launcher's SIGTERM, or for the launcher's end, which ranks on other hosts see.

    Returns whether one of them came.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if error.asked_to_end or signal.sigtimedwait({signal.SIGTERM}, 0.5) or roll_call.launcher_gone(os.environ):
            return True
    return False
