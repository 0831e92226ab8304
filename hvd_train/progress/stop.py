"""Record stop signals of a user or the batch system; all ranks agree on them at the next step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from hvd_train.errors import HvdTrainError


class StopSignal:
    """A context manager that records the first stop signal in `received`; a second one
    ends the process as usual.

    Stop signals are SIGINT, SIGTERM, SIGUSR1, and SIGHUP, unless it is ignored already (nohup).
    SIGHUP never ends the process, and is no first signal to others: a lost terminal sends several.
    Signals are recorded in the main thread.
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
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if isinstance(error, HvdTrainError):  # the recorded signal does not come a second time
            error.asked_to_end = self.received is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        for other, handler in self._previous.items():
            if signal.SIGHUP not in (number, other):
                signal.signal(other, handler)
