"""Send a worker's heartbeats to the driver of its elastic job, in a process of its own:
`heartbeat.py PID SECONDS`.

No torch. There is a heartbeat each `SECONDS`.

C code in the worker may hold Python's lock for minutes, which must not look like its death. This
process pauses while the worker is stopped and ends with it. Its standard input has a line for each
event in the worker: `signal`, `train` or `write`. Its output has what the driver requests: `train`,
`change`, `stop`, or `gone` for a stop without a driver.
"""

import os
import select
import signal
import sys
import time
from pathlib import Path

from hvd_train.launch import client
from hvd_train.launch.launcher import WORKER

_ANSWER_S = 2.0
# a heartbeat takes 3 s if the driver is silent; a longer time is a pause of the worker
_PAUSED_S = 5.0
_GONE_S = 10.0  # a driver that does not answer for this long counts as gone, or out of reach
_GONE_WHILE_LEAVING_S = 3.0  # after a signal: the worker may soon be killed, or its driver has been
_COMMIT_S = 30.0  # from then until the worker must have begun its last commit
_WRITE_S = 600.0  # and the time for writing it
_STOPPED = ("T", "t")  # by a signal or a debugger


class Watch:
    """What the driver requests of a worker, by its answers and its silence.

    Pure: `now` is in seconds on any clock.

    `requested` is the last answer. It stays "change" once the worker is evicted, and is "stop" if
    the driver has not answered for `_GONE_S` seconds. In both cases the worker commits what it can
    and ends; `is_over` says that it took too long.
    """

    def __init__(self, now: float) -> None:
        self.requested = "train"
        self.got_signal = self._evicted = self.is_over = False
        self._all_was_well = self._last = now
        self._patience_s = _GONE_S + _COMMIT_S

    def event(self, name: str) -> None:
        """Note a signal to the worker, that it trains, or that it trains no more and
        may write files for minutes.
        """
        if name == "signal":
            self.got_signal = True
        else:
            self._patience_s = _WRITE_S if name == "write" else _GONE_S + _COMMIT_S

    def beat(self, answer: str | None, now: float) -> str:
        """Note the answer to a heartbeat (None: there was none), and
        return the line for the worker.
        """
        before = self._last
        self._last = now
        if now - before > _PAUSED_S:  # the driver may have been paused as well
            self._all_was_well = now
        if answer is not None and not self._evicted:
            self._all_was_well = now
        self._evicted = self._evicted or answer == "end"
        silence_s = now - self._all_was_well
        if self.requested == "stop":
            pass
        elif self._evicted:  # the others may continue, so this worker must not vote for a stop
            self.requested = "change"
        elif answer == "stop" or silence_s > (
            _GONE_WHILE_LEAVING_S if self.got_signal else _GONE_S
        ):
            self.requested = "stop"
        elif answer is not None:
            self.requested = "change" if answer == "change" else "train"
        self.is_over = silence_s > self._patience_s
        is_gone = self.requested == "stop" and silence_s > _GONE_S and not self._evicted
        return "gone" if is_gone else self.requested


def _state(process: int) -> str:
    """Return the state of our parent process, as `ps` names it; empty if it has ended."""
    if os.getppid() != process:
        return ""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def main(worker: int, every_s: float) -> None:
    """Send heartbeats until the worker ends."""
    # they are for the worker
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    watch = Watch(time.monotonic())
    held: client.HeldRequest | None = None
    known = shown = ""
    while state := _state(worker):
        if state in _STOPPED:
            held = None
            time.sleep(every_s)
            continue
        answer = None
        try:
            if held is None:
                scope = "leaving" if watch.got_signal else "heartbeat"
                held = client.HeldRequest(
                    os.environ, f"{scope}/{os.environ[WORKER]}-{known}", _ANSWER_S
                )
            if (new := held.beat()) is not None:
                known = new
                held = None
            answer = known.partition(".")[0]
        except OSError:
            held = None
        line = f"{watch.beat(answer, time.monotonic())} {known}"
        if watch.is_over:
            os.kill(worker, signal.SIGKILL)
        if line != shown:
            print(shown := line, flush=True)
        if held is None and answer is not None:
            continue  # the next request waits at the driver
        if select.select([sys.stdin], [], [], every_s)[0]:
            events = os.read(sys.stdin.fileno(), 1000).decode().split()
            if not events:
                return  # the worker has ended
            for event in events:
                watch.event(event)
            held = None


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
