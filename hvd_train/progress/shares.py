"""Deal the micro-batches of a step to ranks by their speed.

Pure, and equal on all ranks: the times are sums over them, and Python does all arithmetic in one
order. Numpy may round differently on another processor.
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_train.progress.clock import PHASES
from hvd_train.progress.order import Owners
from hvd_train.progress.pace import FIELDS, MICRO_BATCHES, Pace

_UPDATES = 0
_FIRST_PHASE = FIELDS - len(PHASES)
_EACH = [_FIRST_PHASE + PHASES.index(phase) for phase in ("data", "forward", "backward")]
_FIXED = [_FIRST_PHASE + PHASES.index(phase) for phase in ("optimizer", "other")]
_SHORTER = 0.9  # a step, by a change that pays
_SMALLER = 8  # by how many times
_IN_FAVOUR = 3  # windows in a row
_APART = 12  # windows from one change to the next


@dataclass(frozen=True)
class Speed:
    """The seconds that a rank needs in a step."""

    fixed: float
    each: float  # a micro-batch


_EQUAL = Speed(0.0, 1.0)


def dealt(speeds: Sequence[Speed], count: int) -> list[int]:
    """Return the rank of each of `count` micro-batches.

    Each rank gets one, since nobody knows the speed of a rank without one. Each further one goes
    to the rank that would have done it first. Equal ranks take turns.
    """
    owners = list(range(min(len(speeds), count)))
    ends = [(speed.fixed + 2 * speed.each, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(ends)
    while len(owners) < count:
        end, rank = ends[0]
        owners.append(rank)
        heapq.heapreplace(ends, (end + speeds[rank].each, rank))
    return owners


class Shares:
    """Which rank of a world takes which micro-batches of a step.

    The shares change if that makes steps 10% shorter in three windows in a row, and at most once in
    twelve windows, which is a minute.
    """

    def __init__(self, ranks: int, *, follow_speed: bool) -> None:
        """Begin with equal shares, which stay unless they `follow_speed`."""
        self.version = 0  # counts the changes
        self._follows = follow_speed and ranks > 1
        self._speeds = [_EQUAL] * ranks
        self._owners = dict[int, list[int]]()  # by the number of micro-batches
        self._in_favour = list[list[Speed]]()  # the speeds in windows in a row
        self._losses = list[float]()  # in windows in a row, by too few micro-batches
        self._since_change = _APART
        self._windows = 0  # that have been looked at

    @property
    def unequal(self) -> Owners | None:
        """The owners of micro-batches; None as long as ranks take turns."""
        return self.owners if self.version else None

    def owners(self, count: int) -> list[int]:
        """Return the rank of each of `count` micro-batches."""
        if count not in self._owners:
            self._owners[count] = dealt(self._speeds, count)
        return self._owners[count]

    def changed(self, count: int) -> dict[int, int]:
        """Return the micro-batches of ranks, of `count` in a step, that have more or less
        than an equal share.
        """
        now = Counter(self.owners(count))
        equal = Counter(dealt([_EQUAL] * len(self._speeds), count))
        ranks = range(len(self._speeds))
        return {rank: now[rank] for rank in ranks if now[rank] != equal[rank]}

    def follow(self, pace: Pace, count: int) -> bool:
        """Look at the last window of the ranks; return whether the shares of `count`
        micro-batches change with the next step.
        """
        if not self._follows or pace.windows == self._windows:
            return False
        self._windows = pace.windows
        self._since_change += 1
        now = [_speed(of_rank) for of_rank in pace.window.tolist()]
        seconds = _seconds(self.owners(count), now)
        self._note_loss(seconds, now, count)
        if _seconds(dealt(now, count), now) > _SHORTER * seconds:
            self._in_favour.clear()
            return False
        self._in_favour.append(now)
        if len(self._in_favour) < _IN_FAVOUR or self._since_change < _APART:
            return False
        by_rank = zip(*self._in_favour[-_IN_FAVOUR:], strict=True)
        self.change([_mean(speeds) for speeds in by_rank])
        self._in_favour.clear()
        self._since_change = 0
        return True

    def change(self, speeds: Sequence[Speed]) -> None:
        """Deal the micro-batches of later steps by these speeds."""
        self._speeds = list(speeds)
        self._owners.clear()
        self.version += 1

    @property
    def loss(self) -> float:
        """The part of a step that smaller micro-batches would save, if they are fewer than
        twice the ranks; else 0.
        """
        return min(self._losses[-_IN_FAVOUR:]) if len(self._losses) >= _IN_FAVOUR else 0.0

    def _note_loss(self, seconds: float, speeds: Sequence[Speed], count: int) -> None:
        if count >= 2 * len(speeds):
            return
        smaller = [Speed(speed.fixed, speed.each / _SMALLER) for speed in speeds]
        loss = 1 - _seconds(dealt(smaller, _SMALLER * count), smaller) / seconds
        if loss > 1 - _SHORTER:
            self._losses.append(loss)
        else:
            self._losses.clear()


def _seconds(owners: Sequence[int], speeds: Sequence[Speed]) -> float:
    """Return how long the slowest rank takes in a step."""
    numbers = Counter(owners)
    return max(speed.fixed + numbers[rank] * speed.each for rank, speed in enumerate(speeds))


def _speed(sums: Sequence[float]) -> Speed:
    fixed = sum(sums[place] for place in _FIXED) / max(sums[_UPDATES], 1.0)
    each = sum(sums[place] for place in _EACH) / max(sums[MICRO_BATCHES], 1.0)
    return Speed(fixed, each)


def _mean(speeds: Sequence[Speed]) -> Speed:
    return Speed(
        sum(speed.fixed for speed in speeds) / len(speeds),
        sum(speed.each for speed in speeds) / len(speeds),
    )
