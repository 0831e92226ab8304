"""Restart a job when its launcher dies: `python -m hvd_train.elastic.supervisor [--restarts N] -- COMMAND ...`.

If the command ends for good (done, wrong settings, stopped with a commit), so does the supervisor, with the same exit
code. Otherwise it runs the command again, which resumes from its last commit. The wait before the next attempt doubles
each time the command fails soon after its start.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from types import FrameType

from hvd_train.console import outlive, say
from hvd_train.elastic.roster import TOO_FEW_WORKERS, back_off_s
from hvd_train.elastic.worker import COMMITTED, UNRECOVERABLE, WRONG_SETTINGS
from hvd_train.launch.launcher import CONTINUES, OWNER, STARTED, SUPERVISOR

FINAL = (0, WRONG_SETTINGS, *UNRECOVERABLE, *COMMITTED)
STEADY_S = 300.0
GRACE, GRACE_S = "HVD_TRAIN_GRACE_SECONDS", "30"  # from SIGTERM to SIGKILL: committing a large model takes a while
FIRST_WAIT_S, LONGEST_WAIT_S = 2.0, 300.0


def keep_going(command: Sequence[str], restarts: int) -> int:
    """Run the command until it ends for good or has failed `restarts` times in a row; return its exit code."""
    failures, signals = 0, _Signals()
    os.environ |= {STARTED: str(time.monotonic()), OWNER: uuid.uuid4().hex}
    while True:
        started = time.monotonic()
        code = signals.run(command)
        if code in FINAL or signals.received:
            return code
        is_steady = time.monotonic() - started >= STEADY_S and code != TOO_FEW_WORKERS
        failures = 1 if is_steady else failures + 1
        if failures > restarts:
            say(f"the job has failed {failures} times in a row, the last time with exit code {code}")
            return code
        wait_s = back_off_s(FIRST_WAIT_S, LONGEST_WAIT_S, failures - 1)
        say(f"the job ended with exit code {code}; it resumes from its last commit in {wait_s:.0f} s")
        if signals.wait(wait_s):
            return code
        os.environ[CONTINUES] = "1"


class _Signals:
    """Passes signals on to the command; after a signal there is no next attempt."""

    def __init__(self) -> None:
        self.received = False
        self._process: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup
                signal.signal(number, self._pass_on)

    def run(self, command: Sequence[str]) -> int:
        """Run the command and return its exit code; 128 + N if signal N ended it."""
        environment = {GRACE: GRACE_S, **os.environ, SUPERVISOR: str(os.getpid())}
        # In its own process group: a terminal's Ctrl-C comes here, and is passed on once.
        with subprocess.Popen(command, start_new_session=True, env=environment) as self._process:
            if self.received:  # while it was starting
                self._process.terminate()
            code = self._process.wait()
        return code if code >= 0 else 128 - code

    def wait(self, seconds: float) -> bool:
        """Wait for a signal; return whether there was one."""
        end = time.monotonic() + seconds
        while not self.received and time.monotonic() < end:
            time.sleep(0.1)
        return self.received

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        again, self.received = self.received, True
        # A lost terminal sends several, and after a second signal the launcher no longer waits for commits.
        if self._process is not None and (not again or number != signal.SIGHUP):
            self._process.send_signal(number if number == signal.SIGINT else signal.SIGTERM)  # it handles no others


def main() -> None:
    """Run the command line `[--restarts N] -- COMMAND ...`."""
    outlive()
    parser = argparse.ArgumentParser(prog="python -m hvd_train.elastic.supervisor", description=__doc__)
    parser.add_argument("--restarts", type=int, default=10, help="attempts that may fail in a row (default: 10)")
    parser.add_argument("command", nargs="+", help="what to keep going, after --")
    options = parser.parse_args()
    sys.exit(keep_going(options.command, options.restarts))


if __name__ == "__main__":
    main()
