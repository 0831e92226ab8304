"""Errors that end one worker after another in the same place: those are in the program or in the data. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hvd_train.elastic.worker import FAULT_REPEATS, WRONG_SETTINGS, Worker

SAME_ERRORS = 3  # an error that comes back so often, in whichever worker
NEAR_STEPS = 1  # data are read ahead or not, as it comes: one torn picture may end workers in neighbouring steps

Place = int | Literal["building", "meeting"]
"""Where an error has ended a worker: in the step after so many steps, before it was in a world, or as its ranks met."""


def place_of_error(worker: Worker, *, others_train: bool) -> Place | None:
    """Return where an error has ended this worker, or None where that says nothing about the job.

    An error may be the worker's own: others do well where it failed. `others_train` says whether a member of the job's
    last world still runs, which may have formed since the worker failed in an earlier one.
    """
    if not worker.world:
        return None if others_train else "building"
    if worker.last_word is None:
        return None  # nothing is known of it
    if worker.failed_to_meet:
        return None if not worker.has_met and any(other.has_met for other in worker.world) else "meeting"
    return worker.last_word.step


@dataclass(frozen=True)
class ErrorsInARow:
    """How many workers an error has ended one after another, with no error elsewhere in between."""

    count: int = 0
    place: Place = "building"
    exit_code: int = FAULT_REPEATS
    """That of a job which they end: wrong settings where the last worker has said so."""

    def and_another(self, place: Place, worker: Worker) -> ErrorsInARow:
        """Return the row with this worker, which an error has ended in `place`; elsewhere a new row begins."""
        wrong_settings = worker.last_word is not None and worker.last_word.exit_code == WRONG_SETTINGS
        exit_code = WRONG_SETTINGS if wrong_settings else FAULT_REPEATS
        if not self._is_here(place):
            return ErrorsInARow(1, place, exit_code)
        return ErrorsInARow(self.count + 1, self.place, exit_code)

    def once_a_world_forms(self) -> ErrorsInARow:
        """Return what of the row still counts when a world has formed: its workers have been built."""
        return ErrorsInARow() if self.place == "building" else self

    @property
    def is_long(self) -> bool:
        """Whether chance, or one host, no longer explains them."""
        return self.count >= SAME_ERRORS

    def __str__(self) -> str:
        known = {"building": "before the ranks met", "meeting": "when the ranks met"}
        where = f"in step {self.place + 1}" if isinstance(self.place, int) else known[self.place]
        return f"{self.count} workers in a row ended with an error {where} (see above)"

    def _is_here(self, place: Place) -> bool:
        if isinstance(place, int) and isinstance(self.place, int):
            return abs(place - self.place) <= NEAR_STEPS
        return place == self.place
