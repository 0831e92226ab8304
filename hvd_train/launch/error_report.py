"""Print an error that ends the job once for all ranks, by the rank that knows it best."""

import os
import signal
import socket
import time

from hvd_train.console import say
from hvd_train.errors import HvdTrainError, RankLost
from hvd_train.launch import last_word, launcher, roll_call
from hvd_train.launch.launcher import Launch

_LAUNCHER_SECONDS = 10.0  # ranks of one host can be seconds apart while they import


def report_once(error: HvdTrainError) -> None:
    """Print an error once for all ranks: by rank 0, or by the one rank that raised it, with that rank's name.

    A launcher ends all ranks when the first one ends, with that rank's exit code. So other ranks wait to be ended, and
    print the error only if that does not happen. In an elastic job the driver prints it.
    """
    if error.reported or last_word.tell(os.environ, error):
        return
    launched = launcher.launched(os.environ)
    if launched is None:
        say(str(error))
    elif error.raised_by is not None:
        _say_with_name(launched, error)
    elif launched.rank == 0:
        say(str(error))
        if isinstance(error, RankLost):
            _ended_by_launcher(error)
    elif not _ended_by_launcher(error):
        _say_with_name(launched, error)


def _say_with_name(launched: Launch, error: HvdTrainError) -> None:
    say(f"rank {launched.rank} on {socket.gethostname()}: {error}")


def _ended_by_launcher(error: HvdTrainError) -> bool:
    """Wait some seconds for SIGTERM from the launcher, or for its end; return whether one of them came."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    end = time.monotonic() + _LAUNCHER_SECONDS
    while time.monotonic() < end:
        if error.asked_to_end or signal.sigtimedwait({signal.SIGTERM}, 0.5) or roll_call.launcher_gone(os.environ):
            return True
    return False
