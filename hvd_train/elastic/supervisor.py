"""Keeps a job going when its launcher dies: `python -m hvd_train.elastic.supervisor [--restarts N] -- COMMAND ...`.

A job that has ended for good (done, wrong settings, a committed stop) is left at that. Otherwise the command is given
again, which goes on from the last commit; it waits longer each time the command fails without having lived long.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType

from hvd_train.elastic.roster import COMMITTED, HOPELESS, WRONG_SETTINGS
from hvd_train.launch.launcher import GOES_ON, STARTED, SUPERVISOR

FINAL = (0, WRONG_SETTINGS, *HOPELESS, *COMMITTED)
STEADY_S = 300.0
GRACE, GRACE_S = "HVD_TRAIN_GRACE_SECONDS", "30"  # between SIGTERM and SIGKILL: a large model's commit takes a while
FIRST_WAIT_S, LONGEST_WAIT_S = 2.0, 300.0


@dataclass
class Patience:
    """Whether to try again after so many seconds of life, and how long to wait before."""

    restarts: int
    failures: int = field(default=0, init=False)

    def after(self, lived_s: float) -> float | None:
        """Seconds to wait before the next attempt; None where enough have failed in a row."""
        self.failures = 1 if lived_s >= STEADY_S else self.failures + 1
        if self.failures > self.restarts:
            return None
        return min(FIRST_WAIT_S * 2.0 ** (self.failures - 1), LONGEST_WAIT_S)


def keep_going(command: Sequence[str], restarts: int) -> int:
    """Run the command until it has ended for good; its exit code then."""
    patience = Patience(restarts)
    stop = _Stop()
    os.environ[STARTED] = str(time.time())
    while True:
        started = time.monotonic()
        code = stop.run(command)
        if code in FINAL or stop.received:
            return code
        wait = patience.after(time.monotonic() - started)
        if wait is None:
            _say(f"the job has failed {patience.failures} times in a row, the last time with exit code {code}")
            return code
        _say(f"the job ended with exit code {code}; it goes on from its last commit in {wait:.0f} s")
        if stop.wait(wait):
            return code
        os.environ[GOES_ON] = "1"


class _Stop:
    """Signals go to the command, which ends in its own way; there is no next attempt then."""

    def __init__(self) -> None:
        self.received = False
        self._process: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._pass_on)

    def run(self, command: Sequence[str]) -> int:
        """The exit code of the command; 128 + N where signal N has ended it."""
        # A group of its own: a terminal's Ctrl-C comes here, and is passed on once.
        environment = {GRACE: GRACE_S, **os.environ, SUPERVISOR: str(os.getpid())}
        with subprocess.Popen(command, start_new_session=True, env=environment) as self._process:
            code = self._process.wait()
        return code if code >= 0 else 128 - code

    def wait(self, seconds: float) -> bool:
        """Sleep, or return at once on a signal; whether one has come."""
        end = time.monotonic() + seconds
        while not self.received and time.monotonic() < end:
            time.sleep(0.1)
        return self.received

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self.received = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM if number == signal.SIGUSR1 else number)


def _say(line: str) -> None:
    print(f"hvd-train: {line}", file=sys.stderr, flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m hvd_train.elastic.supervisor", description=__doc__)
    parser.add_argument("--restarts", type=int, default=10, help="attempts that may fail in a row (default: 10)")
    parser.add_argument("command", nargs="+", help="what to keep going, after --")
    options = parser.parse_args()
    sys.exit(keep_going(options.command, options.restarts))


if __name__ == "__main__":
    main()
