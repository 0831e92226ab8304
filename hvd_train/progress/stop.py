"""Record stop signals of a user or the batch system; all ranks agree on them at the next step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from hvd_train.errors import HvdTrainError

_LONGEST_READ_S = 10.0  # after a signal; launchers kill ranks after 30 s
_AGAIN_S = 1.0


class _Reading:
    """Notes that the main thread reads data inside a block, which takes long if a store fails."""

    is_on = False

    def __enter__(self) -> None:
        self.is_on = threading.current_thread() is threading.main_thread()

    def __exit__(self, *_: object) -> None:
        self.is_on = False


reading = _Reading()


class StopSignal:
    """A context manager that records the first stop signal in `received`; a second one
    ends the process as usual.

    Stop signals are SIGINT, SIGTERM, SIGUSR1, and SIGHUP, unless it is ignored already (nohup).
    SIGHUP never ends the process, and is no first signal to others: a lost terminal sends several.
    Signals are recorded in the main thread. If it is `reading` some seconds later, this raises
    SystemExit there, since it might not come to the next step before it is killed.
    """

    def __init__(self, *, hangup: bool = True) -> None:
        """Without `hangup`, ignore SIGHUP inside the block."""
        self._hangup = hangup
        self.received: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                self._previous[number] = signal.signal(number, self._note)
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
                handler = self._note if self._hangup else signal.SIG_IGN
                self._previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *traceback: object
    ) -> None:
        if self.received:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if isinstance(error, HvdTrainError):  # the recorded signal does not come a second time
            error.asked_to_end = self.received is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        self._previous.setdefault(signal.SIGALRM, signal.signal(signal.SIGALRM, self._end_reading))
        signal.setitimer(signal.ITIMER_REAL, _LONGEST_READ_S, _AGAIN_S)
        for other, handler in self._previous.items():
            if signal.SIGHUP not in (number, other) and other != signal.SIGALRM:
                signal.signal(other, handler)

    def _end_reading(self, _number: int, _frame: FrameType | None) -> None:
        if reading.is_on:
            raise SystemExit(128 + (self.received or 0))
