"""Restart a job when its launcher dies: `python -m hvd_train.elastic.supervisor RESTARTS COMMAND ...`.

If the command ends for good (done, wrong settings, stopped with a commit), so does the supervisor, with the same exit
code. Otherwise it runs the command again, which resumes from its last commit. The wait before the next attempt doubles
each time the command fails soon after its start.
"""

import os
import signal
import sys
import time
import uuid
from collections.abc import Sequence

from hvd_train.console import outlive, say
from hvd_train.elastic.roster import COMMITTED, TOO_FEW_WORKERS, UNRECOVERABLE, WRONG_SETTINGS, back_off_s
from hvd_train.launch.child import STOPPING, Child
from hvd_train.launch.launcher import CONTINUES, OWNER, SUPERVISOR

FINAL = (0, WRONG_SETTINGS, *UNRECOVERABLE, *COMMITTED)
STEADY_S = 300.0
GRACE, GRACE_S = "HVD_TRAIN_GRACE_SECONDS", "30"  # from SIGTERM to SIGKILL: committing a large model takes a while
FIRST_WAIT_S, LONGEST_WAIT_S = 2.0, 300.0


def keep_going(command: Sequence[str], restarts: int) -> int:
    """Run the command until it ends for good or has failed `restarts` times in a row; return its exit code."""
    failures, child = 0, Child({**STOPPING, signal.SIGINT: signal.SIGINT})  # the driver handles no others
    os.environ[OWNER] = uuid.uuid4().hex
    while True:
        started = time.monotonic()
        code = child.run(command, {GRACE: os.environ.get(GRACE, GRACE_S), SUPERVISOR: str(os.getpid())})
        if code in FINAL or child.received:
            return code
        is_steady = time.monotonic() - started >= STEADY_S and code != TOO_FEW_WORKERS
        failures = 1 if is_steady else failures + 1
        if failures > restarts:
            say(f"the job has failed {failures} times in a row, the last time with exit code {code}")
            return code
        wait_s = back_off_s(FIRST_WAIT_S, LONGEST_WAIT_S, failures - 1)
        say(f"the job ended with exit code {code}; it resumes from its last commit in {wait_s:.0f} s")
        if child.wait(wait_s):
            return code
        os.environ[CONTINUES] = "1"


def main() -> None:
    """Run the command line `RESTARTS COMMAND ...`."""
    outlive()
    sys.exit(keep_going(sys.argv[2:], int(sys.argv[1])))


if __name__ == "__main__":
    main()
