"""One worker of an elastic job, as the job knows it, and what its exit code says. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hvd_train.launch.last_word import LastWord

# Exit codes of a worker that end the whole job: wrong settings; replicas that differ, a step that breaks in every
# world, a loss that stays not finite, last files that could not be written; and a commit before the end, on a signal or
# because the time was up.
WRONG_SETTINGS = 2
FAULT_REPEATS = 5
UNRECOVERABLE = (4, FAULT_REPEATS, 6, 74)
STOPPED = (129, 130, 138, 143)  # by a signal to the worker
NO_TIME_LEFT = 75  # or no driver
COMMITTED = (NO_TIME_LEFT, *STOPPED)


class Stage(Enum):
    """What a worker is doing, as far as the roster knows."""

    STARTING = "starting"
    READY = "ready"
    """It has built all it needs and waits for its first rank."""
    TRAINING = "training"
    MEETING = "meeting"
    """It has left its world and waits for a rank in the next one."""
    LEAVING = "leaving"
    """It has told which error ends it."""
    ENDING = "ending"
    """It has been told to end."""


@dataclass(eq=False)
class Worker:
    """One process in a slot of a host, with a number that no other process of the job has or had."""

    number: int
    host: str
    slot: int
    started_at: float
    heard_at: float
    """When its last heartbeat or request came."""
    stage: Stage = Stage.STARTING
    told_to_end: bool = False
    """Whether a signal has told it to end: it leaves after the next step, and the others go on."""
    joined_at: float | None = None
    """When it became a member of a world."""
    world: tuple[Worker, ...] = ()
    """The members of the last world that it was in, itself among them; others may have formed another one since."""
    has_met: bool = False
    """Whether it is known to have come to one state with the other ranks of a world."""
    last_word: LastWord | None = None
    said_at: float = 0.0
    """When its last word came."""

    def __str__(self) -> str:
        return f"{self.host}[{self.slot}]"

    @property
    def failed_to_meet(self) -> bool:
        """Whether it has said that it ends before the ranks of its world had come to one state."""
        return self.last_word is not None and self.last_word.during == "meeting"

    def meant_exit_code(self, exit_code: int) -> int:
        """Return the exit code that it meant to end with, where its process has ended with `exit_code`.

        A library may crash in its exit handlers; where an error has ended it, its last word says how.
        """
        word = self.last_word
        if word is not None and (word.error or exit_code < 0 or exit_code >= 128):
            return word.exit_code
        return exit_code
