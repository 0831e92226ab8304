"""A service that numbers go to, in a thread of its own: one that is slow, down or hangs costs training nothing."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from typing_extensions import override

from hvd_train.run_files import replay
from hvd_train.run_files.destination import Destination, Tracker
from hvd_train.run_files.durable import Permission, always
from hvd_train.run_files.masked import masked, reason
from hvd_train.run_files.records import Ending, Numbers

_MOST = 10_000  # records that wait: some 20 MB
_SENT_TOGETHER = 500
_AGAIN_S = 30.0  # how often a service is tried that could not be reached
_AT_END_S = 20.0
_HANDED_ON_S = 5.0  # other ranks may be waiting meanwhile
_SOON_S = 2.0  # what needs no word


class InBackground(Destination):
    """Gives numbers to a tracker in their order. What it has to say is said in the thread that adds numbers."""

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        metrics: Path,
        report: Callable[[str], None],
        permission: Permission = always,
        most: int = _MOST,
    ) -> None:
        """Begin to open the tracker, which is called `name`; what it lacks of the file `metrics` is given to it first.

        `report` takes a sentence for the user. Where more than `most` records wait, the oldest are lost. The tracker is
        given nothing more where `permission` says no.
        """
        self._name, self._tracker, self._metrics, self._most = name, tracker, metrics, most
        self._report, self._permission = report, permission
        self._earlier = metrics.stat().st_size if metrics.exists() else 0  # bytes: what comes later is added here, too
        self._changed = threading.Condition()  # guards all that follows
        self._waiting: deque[Numbers] = deque()
        self._in_hand = self._lost = 0
        self._last_step = 0
        self._to_say: list[str] = []
        self._is_closing = False
        self._ending: Ending | None = None
        self._thread = threading.Thread(target=self._work, name=f"log-to-{name}", daemon=True)
        self._thread.start()

    @override
    def begin(self, names: Sequence[str]) -> None:
        pass

    @override
    def add(self, numbers: Numbers) -> None:
        with self._changed:
            self._waiting.append(numbers)
            self._last_step = numbers.step
            if len(self._waiting) > self._most:
                self._waiting.popleft()
                self._lose(1, "it does not keep up, or does not answer")
            self._changed.notify()
        self._say()

    @override
    def close(self, ending: Ending | None) -> None:
        """Wait for what is still to be sent: 20 seconds at most, or 5 where the run goes on in another process."""
        with self._changed:
            self._ending, self._is_closing = ending, True
            if ending is not None and ending.scores:
                self._waiting.append(Numbers("end", self._last_step, None, time.time(), ending.scores))
            self._changed.notify()
        limit_s = _HANDED_ON_S if ending is None else _AT_END_S
        soon_s = min(_SOON_S, limit_s)
        self._thread.join(soon_s)
        if self._thread.is_alive():
            self._report(f"waiting {limit_s:.0f} s at most for {self._name} to take the last numbers")
            self._thread.join(limit_s - soon_s)
        if has_given_up := self._thread.is_alive():
            self._tracker.abandon()
        with self._changed:
            self._lost += self._in_hand + len(self._waiting)
            lost = self._lost
        self._say()
        if lost:
            self._report(f"{self._name} lacks {lost} records, which {self._metrics.name} has")
        elif has_given_up:
            self._report(f"{self._name} did not confirm that it has the end of the run")

    def _say(self) -> None:
        with self._changed:
            lines, self._to_say = self._to_say, []
        for line in lines:
            self._report(line)

    def _lose(self, count: int, why: str) -> None:
        """Count records as lost, and have it said the first time. The caller has the lock."""
        if not self._lost:
            self._to_say.append(f"numbers are lost for {self._name}: {why}; training goes on")
        self._lost += count

    def _work(self) -> None:
        if not self._is_open():
            return
        for batch in self._batches():
            if not self._permission():
                return
            try:
                self._tracker.add(batch)
            except Exception as error:  # noqa: BLE001  # whatever a service or its library may raise
                with self._changed:
                    self._lose(len(batch), reason(error))
        if not self._permission():
            return
        try:
            self._tracker.close(self._ending)
        except Exception as error:  # noqa: BLE001
            with self._changed:
                self._to_say.append(f"{self._name} could not be told how the run ended: {reason(error)}")

    def _is_open(self) -> bool:
        """Open the tracker, again and again if need be; return False where nothing is to be sent any more."""
        has_failed = False
        while self._permission():
            try:
                line = self._tracker.open()
            except Exception as error:  # noqa: BLE001
                line = "" if has_failed else f"cannot reach {self._name}, and tries again: {reason(error)}"
                has_failed = True
            else:
                has_failed = False
            with self._changed:
                self._to_say += [masked(line)] if line else []
                if not has_failed:
                    return True
                if self._changed.wait_for(lambda: self._is_closing, _AGAIN_S):
                    return False
        return False

    def _batches(self) -> Iterator[list[Numbers]]:
        """Yield what the tracker lacks: first of the file, then of what is added, until the journal is closed."""
        try:
            yield from _cut(replay.missing(self._metrics, self._earlier, self._tracker.is_new))
        except Exception as error:  # noqa: BLE001
            with self._changed:
                self._to_say.append(f"{self._name} may lack earlier numbers: {reason(error)}")
        while True:
            with self._changed:
                self._in_hand = 0
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                taken = [self._waiting.popleft() for _ in range(min(len(self._waiting), _SENT_TOGETHER))]
                self._in_hand = len(taken)
            if not taken:
                return
            if batch := [numbers for numbers in taken if self._tracker.is_new(numbers)]:
                yield batch


def _cut(numbers: Iterable[Numbers]) -> Iterator[list[Numbers]]:
    rest = iter(numbers)
    while batch := list(islice(rest, _SENT_TOGETHER)):
        yield batch
