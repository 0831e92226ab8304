"""Where the program of a rank is, what the ranks have agreed on, and what comes next.

Pure: no torch, files or clock.

A training is executed durably, by replay, as in Temporal or Restate. The program of each rank goes
from point to point: before its loop, at the head of an epoch, before each step, and after the last
step. At a point every rank holds a complete state. Between points run collectives, which are
updates and evaluations of all ranks. Each has a label, and its result is recorded. The record
travels with the state:

- A newcomer and a resumed job begin at the last point, with the values that the program had set
  there. Code before the loop and at the head of the epoch runs again, with the recorded results.
- A survivor that is behind takes the state of the others. It gets their results from the record
  until its program has come to the place of that state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

START, HEAD, STEPS, TAIL = range(4)
"""The parts of a program: before the loop; in an epoch before its steps, its
steps, and after them."""
Label = tuple[int, int, int, int]
"""A collective: epoch, part, step (0 outside of STEPS), and its number there. Labels
grow along the program."""


@dataclass(frozen=True)
class Place:
    """The place of a point in the program; by default its start."""

    epoch: int = -1  # epochs before this one
    part: int = START
    step: int = 0  # steps done
    cursor: int = 0  # samples of the epoch that are used

    def label(self, number: int) -> Label:
        """Return the label of a collective after this point; they are counted from 0,
        and -1 is the point itself.
        """
        return self.epoch, self.part, self.step + 1 if self.part == STEPS else 0, number


class History:
    """The place of this rank's program, and the results of all ranks that it may need."""

    def __init__(self) -> None:
        self.at = Place()  # the last point of this program
        self.waits = self.at.label(-1)  # the point or collective that this program has come to
        # of collectives since the last point, and of others that ranks may need
        self.results: dict[Label, Any] = {}
        self.is_whole = True  # False: between points the state is none that a point can have
        # what the ranks have decided with the last update, until the next point
        self._agreed: Any = None
        self._count = 0  # collectives of this program since the last point
        self.label = self.at.label(0)  # of the next collective
        # where a newcomer or a resumed job begins, until its program is there
        self._begins_at: Place | None = None
        # the place of the state that this rank has got, until its program is there
        self._received_at: Label | None = None

    @property
    def state_at(self) -> Label:
        """The place of this rank's state, which may be ahead of its program."""
        return self.waits if self._received_at is None else max(self.waits, self._received_at)

    @property
    def is_behind(self) -> bool:
        """Whether the state is ahead of the program."""
        return self._received_at is not None

    # Points

    def come_to(self, place: Place) -> None:
        """Come to a point. Forget the results that no rank needs any more.

        A newcomer needs those before the loop and at the head of the epoch; a survivor that is
        behind lacks the last.
        """
        self._begin_from(place)
        self.is_whole = True
        last = next(reversed(self.results), None)
        self.results = {
            label: result
            for label, result in self.results.items()
            if label == last or label[1] == START or label[:2] == (place.epoch, HEAD)
        }

    def begin_at(self, place: Place) -> None:
        """Begin a program whose state is of this point: the code up to there
        runs again, or is left out.
        """
        if place.part != START:
            self._begins_at = place

    @property
    def is_replayed(self) -> bool:
        """Whether this program has not come to the epoch in which it begins."""
        return self._begins_at is not None

    def begin_epoch_again(self) -> None:
        """Come to the head of the epoch in which this program begins."""
        assert self._begins_at is not None
        self._begin_from(Place(self._begins_at.epoch, HEAD))

    def begin_steps(self) -> bool:
        """Begin the steps of an epoch; return whether this program begins at a
        point among or after them.
        """
        place = self._begins_at
        if place is None or place.part == HEAD:
            return False
        self._begin_from(place)
        return True

    def _begin_from(self, place: Place) -> None:
        self.go_to(place)
        self.waits = place.label(-1)

    def repeats_step(self, num_samples: int) -> bool:
        """Return whether the next step is the one at which this program begins, once;
        an epoch has `num_samples`.
        """
        place = self._begins_at
        self._begins_at = None
        return place is not None and place.part == STEPS and place.cursor < num_samples

    def go_to(self, place: Place) -> None:
        """Continue after a point, also if this program does not come to it itself."""
        self.at = place
        self._count = 0
        self.label = place.label(0)

    # Collectives

    @property
    def is_recorded(self) -> bool:
        """Whether the result of the next collective is known."""
        return self.label in self.results

    def begin_collective(self) -> None:
        """Come to the next collective."""
        self.waits = self.label

    def record(self, result: Any, agreed: Any = None, *, is_whole: bool = True) -> None:
        """Record the result of a collective, and what the ranks have decided
        with it for the next point.

        `is_whole` says whether the state afterwards is one that a point can have.
        """
        self.results[self.label] = result
        self._agreed = agreed or self._agreed
        self.is_whole = self.is_whole and is_whole

    def spoil(self) -> None:
        """Note that the state is none that a point can have, until the next point."""
        self.is_whole = False

    def take_agreed(self) -> Any:
        """Return what the ranks have decided with the last update, once."""
        agreed = self._agreed
        self._agreed = None
        return agreed

    def enter_world(self) -> None:
        """Forget what the ranks of the last world have decided: the others may not know of it."""
        self._agreed = None

    def take_result(self) -> Any:
        """Return the recorded result of a collective, and go on to the next one."""
        result = self.results[self.label]
        self._count += 1
        self.label = self.at.label(self._count)
        return result

    # States of other ranks

    def load(self, results: Mapping[Label, Any], *, behind: bool) -> None:
        """Take the record of a state; a program that is `behind` keeps its own results."""
        self.results = {**self.results, **results} if behind else dict(results)

    def forget(self, place: Place, is_lost: Callable[[Any], bool]) -> None:
        """Forget the results since a point that are lost; their collectives run again."""
        since = place.label(0)[:3]
        self.results = {
            label: result
            for label, result in self.results.items()
            if label[:3] != since or not is_lost(result)
        }

    def receive(self, place: Label) -> None:
        """Note that this rank has a state of this place, sent by another rank or loaded."""
        self._received_at = place

    def arrives(self) -> bool:
        """Return whether this program is now at the place of a received state, which it
        must then load once more.

        Until then the program has run its own code on that state. Code that changes weights has
        changed them twice.
        """
        if self._received_at is None or self.waits < self._received_at:
            return False
        is_there = self.waits == self._received_at
        self._received_at = None
        return is_there
