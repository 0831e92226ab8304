"""Meetings whose ranks do not come to one state though all of them live: who is left out then, and how long. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hvd_train.elastic.worker import Worker

MEETINGS = 3  # so many that fail in a row are the fault of whoever is new
MOST_ALONE = 10  # so many of a rank alone: no other world will do better
LEFT_OUT_S, LONGEST_LEFT_OUT_S = 60.0, 3600.0  # how long such a newcomer is left out, first and at most


@dataclass(frozen=True)
class FailedMeetings:
    """How many meetings in a row have failed. One that breaks since a rank has died says nothing and is not counted."""

    in_a_row: int = 0

    def and_another(self) -> FailedMeetings:
        """Return the row with one more meeting."""
        return FailedMeetings(self.in_a_row + 1)

    def to_leave_out(self, members: Sequence[Worker], on_trial: Collection[Worker]) -> list[Worker]:
        """Return who of the members, in the order of their ranks, is to be left out of the next meeting; often nobody.

        It is whoever is new to the others; where nobody is, or everybody, the last rank. Members `on_trial` were left
        out before: with one of them a single failure is enough.
        """
        new = [worker for worker in members if not worker.has_met]
        patient = self.in_a_row < MEETINGS and not any(worker in on_trial for worker in new)
        if patient or len(members) == 1:
            return []
        return new if 0 < len(new) < len(members) else list(members[-1:])

    def is_hopeless(self, members: Sequence[Worker]) -> bool:
        """Return whether a rank that has nobody left to meet has failed too often."""
        return len(members) == 1 and self.in_a_row >= MOST_ALONE

    def without_those(self) -> FailedMeetings:
        """Return the row after somebody was left out: if it fails once more without these, somebody else goes."""
        return FailedMeetings(self.in_a_row - 1)

    def __str__(self) -> str:
        return "" if self.in_a_row == 1 else f", {self.in_a_row} times in a row"
