"""Errors that end one worker after another at the same place. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hvd_train.elastic.worker import FAULT_REPEATS, WRONG_SETTINGS, Worker

SAME_ERRORS = 3  # an error that repeats this often, in any worker, ends the job
NEAR_STEPS = 1  # samples may be read one step ahead, so one damaged image can end workers in neighbouring steps

Place = int | Literal["building", "meeting"]
"""An error's place: after this many steps, before the first world, or in a rendezvous."""


def place_of_error(worker: Worker, *, others_train: bool) -> Place | None:
    """Return the place of a worker's error, or None if only this worker may have it.

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
    """How many workers in a row an error has ended at one place."""

    count: int = 0
    place: Place = "building"
    exit_code: int = FAULT_REPEATS
    """The exit code of the job if the errors end it."""

    def and_another(self, place: Place, worker: Worker) -> ErrorsInARow:
        """Return the row with this worker; an error in another place starts a new row."""
        wrong_settings = worker.last_word is not None and worker.last_word.exit_code == WRONG_SETTINGS
        exit_code = WRONG_SETTINGS if wrong_settings else FAULT_REPEATS
        if isinstance(place, int) and isinstance(self.place, int):
            is_same = abs(place - self.place) <= NEAR_STEPS
        else:
            is_same = place == self.place
        return ErrorsInARow(self.count + 1, self.place, exit_code) if is_same else ErrorsInARow(1, place, exit_code)

    def once_a_world_forms(self) -> ErrorsInARow:
        """Return the errors that still count when a world has formed: its workers have been built."""
        return ErrorsInARow() if self.place == "building" else self

    @property
    def is_long(self) -> bool:
        """Whether chance, or one host, no longer explains them."""
        return self.count >= SAME_ERRORS

    def __str__(self) -> str:
        known = {"building": "before the ranks met", "meeting": "when the ranks met"}
        place = f"in step {self.place + 1}" if isinstance(self.place, int) else known[self.place]
        return f"{self.count} workers in a row ended with an error {place} (see above)"
