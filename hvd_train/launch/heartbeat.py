"""Send a worker's heartbeats to the driver of its elastic job, in a process of its own:
`heartbeat.py PID SECONDS`.

No torch. There is a heartbeat each `SECONDS`.

C code in the worker may hold Python's lock for minutes, which must not look like its death. This
process pauses while the worker is stopped and ends with it. `Heartbeat` is the worker's end of two
pipes. One has a line for each event in the worker; the other has what the driver requests, or
`gone` for a stop without a driver.
"""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Literal, cast

import psutil

from hvd_train.launch import child, client
from hvd_train.launch.workers import WORKER, Request

Event = Literal["signal", "train", "write"]
"""A signal to the worker; it trains; it trains no more, and may write files for minutes."""

_EVERY_S = 1.0
_ANSWER_S = 2.0
# a heartbeat takes 3 s if the driver is silent; a longer time is a pause of the worker
_PAUSED_S = 5.0
_GONE_S = 10.0  # a driver that does not answer for this long counts as gone, or out of reach
_GONE_WHILE_LEAVING_S = 3.0  # after a signal: the worker may soon be killed, or its driver has been
_COMMIT_S = 30.0  # from then until the worker must have begun its last commit
_WRITE_S = 600.0  # and the time for writing it
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)  # by a signal or a debugger


class Heartbeat:
    """Sends heartbeats of this process; `requested` is what the driver requests.

    The process that sends them ends this one if its last commit takes too long.
    """

    def __init__(self) -> None:
        """Begin; the environment has the address of the driver."""
        self.requested: Request = "train"
        self.driver_gone = False  # whether the driver does not answer any more
        self._got_signal = False
        words = [__file__, str(os.getpid()), str(_EVERY_S)]
        self._process = child.beside(words, stdout=subprocess.PIPE)
        lines = self._process.stdout or ()
        threading.Thread(target=self._read, args=(lines,), daemon=True, name="heartbeat").start()

    def report(self, event: Event) -> None:
        """Report an event at once; after a signal the driver decides whether this worker leaves or
        all stop.
        """
        if event == "signal" and self._got_signal:
            return
        self._got_signal = self._got_signal or event == "signal"
        with suppress(OSError):  # the process has ended, and the driver will evict this worker
            print(event, file=self._process.stdin, flush=True)

    def world_formed(self) -> None:
        """Note that the ranks have connected, which was the requested change."""
        if self.requested == "change":
            self.requested = "train"  # a further change is requested again

    def _read(self, lines: Iterable[str]) -> None:
        for line in lines:
            word = line.split()[0]
            self.driver_gone = word == "gone"
            self.requested = "stop" if self.driver_gone else cast(Request, word)


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
        """Note an event in the worker."""
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


def main(worker: int, every_s: float) -> None:
    """Send heartbeats until the worker ends."""
    child.ignore_signals()
    process = psutil.Process(worker)
    watch = Watch(time.monotonic())
    held: client.HeldRequest | None = None
    known = shown = ""
    while os.getppid() == worker:
        if process.status() in _STOPPED:
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
