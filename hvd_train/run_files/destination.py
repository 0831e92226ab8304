"""Where the numbers of a run go: what the journal feeds, and what a service of somebody else's must be able to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hvd_train.run_files.records import Ending, Numbers


class Destination(Protocol):
    """Takes the numbers of a run. No method raises for what it cannot write, and none may wait for a network."""

    def begin(self, names: Sequence[str]) -> None:
        """Training starts, or goes on, and these numbers are to come; others may come as well."""

    def add(self, numbers: Numbers) -> None:
        """Write numbers of a step."""

    def close(self, ending: Ending | None) -> None:
        """Finish. The run has come to this ending; None where another process goes on with it, or this one later."""


class Tracker(Protocol):
    """A run at a service. Each method is called in a thread of its own: it may wait for as long as it likes, and raise.

    It has an `is_new`, which says whether the service lacks some numbers.
    """

    def open(self) -> str:
        """Begin the run at the service, or go on with it; return a line that says where it is."""

    def is_new(self, numbers: Numbers) -> bool:
        """Return whether the service lacks these numbers: steps are taken again after a fault, and may not come twice.

        It is called after `open` only.
        """

    def add(self, several: Sequence[Numbers]) -> None:
        """Send numbers, which the service lacks, in their order."""

    def close(self, ending: Ending | None) -> None:
        """Tell the service how the run has ended; None: it goes on elsewhere."""

    def abandon(self) -> None:
        """Give up what is being sent, so that the process can end. It is called in the process's main thread."""
