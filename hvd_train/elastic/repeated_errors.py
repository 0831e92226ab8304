"""Errors that end one worker after another in the same place: their cause is the program or the data. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hvd_train.elastic.worker import FAULT_REPEATS, WRONG_SETTINGS, Worker

SAME_ERRORS = 3  # an error that repeats this often, in any worker, ends the job
NEAR_STEPS = 1  # samples may be read one step ahead, so one damaged image can end workers in neighbouring steps

Place = int | Literal["building", "meeting"]
"""Where an error ended a worker: after this many steps, before its first world, or in a rendezvous."""


def place_of_error(worker: Worker, *, others_train: bool) -> Place | None:
    """Return where an error ended this worker, or None if the error may be the worker's own.

    `others_train` says whether a member of the job's last world still runs.
    """
    if not worker.world:
        return None if others_train else "building"
    if worker.last_word is None:
        return None
    if worker.failed_to_meet:
        return None if not worker.has_met and any(other.has_met for other in worker.world) else "meeting"
    return worker.last_word.step


@dataclass(frozen=True)
class ErrorsInARow:
    """How many workers an error has ended one after another, with no error elsewhere in between."""

    count: int = 0
    place: Place = "building"
    exit_code: int = FAULT_REPEATS
    """The exit code of the job if they end it: wrong settings if the last worker has reported these."""

    def and_another(self, place: Place, worker: Worker) -> ErrorsInARow:
        """Return the row with this worker; an error in another place starts a new row."""
        wrong_settings = worker.last_word is not None and worker.last_word.exit_code == WRONG_SETTINGS
        exit_code = WRONG_SETTINGS if wrong_settings else FAULT_REPEATS
        if not self._is_here(place):
            return ErrorsInARow(1, place, exit_code)
        return ErrorsInARow(self.count + 1, self.place, exit_code)

    def once_a_world_forms(self) -> ErrorsInARow:
        """Return the part of the row that still counts when a world has formed: its workers have been built."""
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
