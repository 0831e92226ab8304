"""The points of a training loop at which the state is whole, and what has been computed since the last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvd_train.progress.metrics import Totals
from hvd_train.tasks.task import Scores

START, HEAD, STEPS, TAIL = range(4)
"""The parts of a program: before the loop; in an epoch before its steps, its steps, and after them."""
Label = tuple[int, int, int, int]
"""A collective of the user's program: epoch, part, step (0 outside of STEPS), and its number there."""


@dataclass(frozen=True)
class Evaluation:
    """The figures of an evaluation on the validation set after an epoch (counted from 1), by name."""

    epoch: int
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Answer:
    """What an update or an evaluation has given the program on all ranks."""

    scores: Scores
    # Of an update only:
    totals: Totals = Totals()  # sums of the measures over the whole global batch
    skipped: bool = False  # whether loss or gradient was not finite, so that nothing changed
    gradient_norm: float = 0.0  # the 2-norm of the whole gradient before it was clipped
    fingerprint: int | None = None  # of the samples of all ranks (`progress.order`), if the run keeps a ledger


@dataclass(frozen=True)
class Point:
    """A point of the program, and the values that its code had set there; without any code, the start.

    A rank that comes later runs the code from here on, with these values. What the others have computed together since
    then is answered from their record.
    """

    epoch: int = -1  # epochs before this one
    part: int = START
    step: int = 0  # steps done
    cursor: int = 0  # samples of the epoch that are used
    best: Evaluation | None = None
    last: Evaluation | None = None
    settings: Sequence[Mapping[str, Any]] = ()  # of each parameter group: learning rate, momentum, ...
    own: Mapping[str, Any] = field(default_factory=dict)  # registered values by name
    own_at_epoch: Mapping[str, Any] = field(default_factory=dict)  # the same at the beginning of the epoch

    def label(self, number: int) -> Label:
        """Return the label of a collective after this point; they are counted from 0."""
        return self.epoch, self.part, self.step + 1 if self.part == STEPS else 0, number


def kept(answers: Mapping[Label, Answer], at: Point) -> dict[Label, Answer]:
    """Return the answers that a rank may still need when others are at a point.

    A newcomer needs those before the loop and at the head of the epoch; a survivor that is behind lacks the last one.
    """
    last = len(answers) - 1
    return {
        label: answer
        for number, (label, answer) in enumerate(answers.items())
        if number == last or label[1] == START or label[:2] == (at.epoch, HEAD)
    }
