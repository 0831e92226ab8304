"""One worker of an elastic job, and the meaning of its exit code. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hvd_train.launch.last_word import LastWord

# Exit codes of a worker that end the whole job. UNRECOVERABLE: replicas differ, a fault repeats, the loss stays not
# finite, the final files could not be written. COMMITTED: a commit before the end of the training.
WRONG_SETTINGS = 2
FAULT_REPEATS = 5
UNRECOVERABLE = (4, FAULT_REPEATS, 6, 74)
STOPPED = (129, 130, 138, 143)  # by a signal to the worker
NO_TIME_LEFT = 75  # or no driver
COMMITTED = (NO_TIME_LEFT, *STOPPED)


class Stage(Enum):
    """The stage of a worker, as far as the roster knows."""

    STARTING = "starting"
    READY = "ready"  # it has built the model and waits for its first rank
    TRAINING = "training"
    MEETING = "meeting"  # it has left its world and waits for a rank in the next one
    LEAVING = "leaving"  # it has reported the error that ends it
    ENDING = "ending"  # it is evicted


@dataclass(eq=False)
class Worker:
    """One process in a slot of a host; its number is unique in the job."""

    number: int
    host: str
    slot: int
    started_at: float
    heard_at: float  # when its last heartbeat or request came
    stage: Stage = Stage.STARTING
    got_signal: bool = False
    joined_at: float | None = None  # when it became a member of a world
    world: tuple[Worker, ...] = ()  # the members of its last world; the others may have formed another one since
    has_met: bool = False  # whether it has connected to other ranks and synchronized the state with them
    last_word: LastWord | None = None  # its exit report
    said_at: float = 0.0  # when that came

    def __str__(self) -> str:
        return f"{self.host}[{self.slot}]"

    @property
    def failed_to_meet(self) -> bool:
        """Whether an error ended it before the ranks of its world had synchronized the state."""
        return self.last_word is not None and self.last_word.during == "meeting"

    def meant_exit_code(self, exit_code: int) -> int:
        """Return the exit report's code if a signal or an error ended it, else `exit_code`.

        ssh returns 255 for a worker that a signal has killed, and a library may crash in its exit handlers.
        """
        word = self.last_word
        if word is not None and (word.error or exit_code < 0 or exit_code >= 128):
            return word.exit_code
        return exit_code
