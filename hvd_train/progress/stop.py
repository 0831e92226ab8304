"""A wish to stop, from Ctrl-C or a signal of the batch system; all ranks agree on it at the next step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from hvd_train.errors import HvdTrainError


class StopSignal:
    """A context manager that notes the first stop signal in `received`; a second one ends the process as usual.

    Stop signals are SIGINT, SIGTERM, SIGUSR1, which batch systems can send some time before they end a job, and SIGHUP,
    which comes when a terminal or an ssh session is gone, unless it is ignored already (nohup). SIGHUP never ends the
    process: shells and the kernel send it several times. Outside the main thread, in which Python allows no signal
    handlers, nothing is noted.
    """

    def __init__(self, *, hangup: bool = True) -> None:
        """Without `hangup`, SIGHUP is ignored inside the block."""
        self._hangup = hangup
        self.received: int | None = None
        """The number of the signal that came first; None before any has come."""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                self._previous[number] = signal.signal(number, self._note)
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
                handler = self._note if self._hangup else signal.SIG_IGN
                self._previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, handler)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *traceback: object) -> None:
        self._restore()
        if isinstance(error, HvdTrainError):  # what was noted until now comes no second time
            error.asked_to_end = self.received is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        hangup = self._previous.pop(signal.SIGHUP, None)
        self._restore()
        if hangup is not None:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            self._previous[signal.SIGHUP] = hangup

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
