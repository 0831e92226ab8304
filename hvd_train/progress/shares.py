"""Deal the micro-batches of a step to ranks by their speed.

Pure, and equal on all ranks: the times are sums over them, and Python does all arithmetic in one
order. Numpy may round differently on another processor.
"""

import heapq
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

from hvd_train.errors import sendable
from hvd_train.progress.clock import PHASES
from hvd_train.progress.pace import FIELDS, MICRO_BATCHES, Pace

_UPDATES = 0
_FIRST_PHASE = FIELDS - len(PHASES)
_EACH = [_FIRST_PHASE + PHASES.index(phase) for phase in ("data", "forward", "backward")]
_FIXED = [_FIRST_PHASE + PHASES.index(phase) for phase in ("optimizer", "other")]
_SHORTER = 0.9  # a step, by a change that pays
_SMALLER = 8  # by how many times
_IN_FAVOUR = 3  # windows in a row
_APART = 12  # windows from one change to the next


@sendable
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


class Deal:
    """Deals the micro-batches of a step by the speeds of all ranks."""

    def __init__(self, speeds: Sequence[Speed], rank: int) -> None:
        """`rank` is the one that `owned` is about."""
        self._ranks = range(len(speeds))
        self._rank = rank
        self.owners = cache(partial(dealt, speeds))
        """Returns the rank of each of `count` micro-batches."""
        self.owned = cache(self._owned)
        """Returns which of `count` micro-batches this rank has."""

    def _owned(self, count: int) -> list[int]:
        return [n for n, owner in enumerate(self.owners(count)) if owner == self._rank]

    def numbers(self, count: int) -> list[int]:
        """Return how many of `count` micro-batches each rank has."""
        owners = self.owners(count)
        return [owners.count(rank) for rank in self._ranks]


class Shares:
    """Which rank of a world takes which micro-batches of a step.

    The shares change if that makes steps 10% shorter in three windows in a row, and at most once in
    twelve windows, which is a minute. What loader processes have read ahead is used before.
    """

    def __init__(self, ranks: int, rank: int, *, follow_speed: bool, read_ahead: int = 0) -> None:
        """Begin with equal shares, which stay unless they `follow_speed`; `rank` is this one.

        The loader processes of a rank read at most `read_ahead` micro-batches ahead.
        """
        self.follow_speed = follow_speed and ranks > 1
        self.begins = 0  # the last change counts after this many steps
        self._rank = rank
        self._read_ahead = read_ahead
        self._before = self._last = self._dealt([_EQUAL] * ranks)
        self._recent = deque[list[Speed]](maxlen=_IN_FAVOUR)  # the speeds in the last windows
        self._in_favour = 0  # windows in a row
        self._losses = list[float]()  # in windows in a row, by too few micro-batches
        self._since_change = _APART
        self._windows = 0  # that have been looked at
        self._is_new = False  # whether a change has not been taken yet

    def owners(self, step: int, count: int) -> list[int]:
        """Return the rank of each of `count` micro-batches, after this many steps."""
        return self._at(step).owners(count)

    def owned(self, step: int, count: int) -> list[int]:
        """Return which of `count` micro-batches this rank has, after this many steps."""
        return self._at(step).owned(count)

    def _at(self, step: int) -> Deal:
        return self._last if step >= self.begins else self._before

    def _dealt(self, speeds: Sequence[Speed]) -> Deal:
        return Deal(speeds, self._rank)

    def changed(self, count: int) -> dict[int, int]:
        """Return the micro-batches of ranks, of `count` in a step, that have more or less
        than an equal share since the last change.
        """
        now = self._last.numbers(count)
        equal = self._dealt([_EQUAL] * len(now)).numbers(count)
        return {rank: now[rank] for rank in range(len(now)) if now[rank] != equal[rank]}

    @property
    def speed(self) -> Speed | None:
        """The speed of this rank in the last windows, if it is known."""
        return _mean([speeds[self._rank] for speeds in self._recent]) if self._recent else None

    def begin(self, known: Sequence[Speed | None], count: int, step: int) -> None:
        """Begin a world, after this many steps of `count` micro-batches, with the speeds that
        are known of its ranks. Another rank counts as one of mean speed.
        """
        speeds = [speed for speed in known if speed is not None]
        if not self.follow_speed or not speeds:
            return
        mean = _mean(speeds)
        now = [mean if speed is None else speed for speed in known]
        if self._pays(now, count):
            self.change(now, step)

    def follow(self, pace: Pace, count: int, step: int) -> None:
        """Look at the last window of the ranks, after this many steps of `count` micro-batches."""
        if not self.follow_speed or pace.windows == self._windows:
            return
        self._windows = pace.windows
        self._since_change += 1
        now = [_speed(of_rank) for of_rank in pace.window.tolist()]
        self._recent.append(now)
        self._note_loss(now, count)
        self._in_favour = self._in_favour + 1 if self._pays(now, count) else 0
        is_soon = self._since_change < _APART or step < self.begins
        if self._in_favour < _IN_FAVOUR or is_soon:
            return
        by_rank = zip(*self._recent, strict=True)
        self.change([_mean(speeds) for speeds in by_rank], step + self._steps_ahead(count))

    def _steps_ahead(self, count: int) -> int:
        """Return how many steps the loader processes of any rank can be ahead."""
        if self._read_ahead == 0:
            return 0
        fewest = max(1, min(self._last.numbers(count)))
        return math.ceil(self._read_ahead / fewest) + 2

    def change(self, speeds: Sequence[Speed], begins: int) -> None:
        """Deal the micro-batches by these speeds after this many steps."""
        self._before = self._last
        self._last = self._dealt(speeds)
        self.begins = begins
        self._in_favour = 0
        self._since_change = 0
        self._is_new = True

    def take_change(self) -> bool:
        """Return whether the shares have changed since the last call."""
        is_new = self._is_new
        self._is_new = False
        return is_new

    def _pays(self, speeds: Sequence[Speed], count: int) -> bool:
        """Return whether to deal by these speeds makes steps shorter enough."""
        now = _seconds(self._last.owners(count), speeds)
        return _seconds(dealt(speeds, count), speeds) <= _SHORTER * now

    @property
    def loss(self) -> float:
        """The part of a step that smaller micro-batches would save, if they are fewer than
        twice the ranks; else 0.
        """
        return min(self._losses[-_IN_FAVOUR:]) if len(self._losses) >= _IN_FAVOUR else 0.0

    def _note_loss(self, speeds: Sequence[Speed], count: int) -> None:
        if count >= 2 * len(speeds):
            return
        smaller = [Speed(speed.fixed, speed.each / _SMALLER) for speed in speeds]
        seconds = _seconds(self._last.owners(count), speeds)
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
