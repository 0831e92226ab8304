"""Which rank is slower in its own work than the others, by the times that all ranks tell each other in logged steps.

All ranks are told the same, so all come to the same answers, whichever of them is rank 0 and writes them down.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from hvd_train.progress.clock import PHASES, WORK

FACTOR = 1.3
"""A rank is slow whose own work takes so many times as long as that of the others,"""
LEAST_S = 0.003
"""and so many seconds of a step longer,"""
STRETCHES, STRETCH_S = 3, 3.5
"""in so many stretches in a row, each of as many logged steps as take so many seconds."""
RECOVERED = 1.15
"""It is no longer slow where it takes less than so many times as long, or half of LEAST_S longer, for as many."""

COLUMNS = (*PHASES, "queued", "samples")
"""What a rank tells of its time: mean seconds of a step in each phase, those in which it stood in line for a core, and
the mean number of its samples in a step. Zeros are a rank that has nothing to tell."""

Cause = Literal["input", "compute", "update", "commit", "other", "load"]
"""What a slow rank is slow in."""
_PHASES_OF: Mapping[Cause, tuple[str, ...]] = {
    "input": ("data",),
    "compute": ("forward", "backward"),
    "update": ("optimizer",),
    "commit": ("commit",),
    "other": ("other",),
}
_WORDS: Mapping[Cause, str] = {
    "input": "in its input",
    "compute": "in its forward and backward passes",
    "update": "in the update of its weights",
    "commit": "by its commits",
    "other": "in what it does between steps",
    "load": "since something else has the cores of its host",
}
assert {*_WORDS} == {*get_args(Cause)}

Times: TypeAlias = npt.NDArray[np.float64]
"""[ranks, COLUMNS]"""
_WORK = [number for number, phase in enumerate(PHASES) if phase != "reduction"]
BY_SAMPLES = [COLUMNS.index(phase) for phase in ("data", "forward", "backward")]
"""The columns of what takes twice as long with twice the samples."""
_DECIMALS = 7  # of seconds, in a record
_QUEUED, SAMPLES = COLUMNS.index("queued"), COLUMNS.index("samples")


@dataclass(frozen=True)
class Found:
    """A rank that has become slow, or is no longer so."""

    rank: int
    cause: Cause | None
    """None where it is no longer slow."""
    seconds: float
    """Its own work in a step: all but its wait for the others."""
    of_others: float
    """The median of the others' work."""
    factor: float
    """How many times as long it takes, as if all ranks had the same number of samples."""

    def describe(self, host: str) -> str:
        """Return what is to be said of it in one line."""
        own, others = (f"{1e3 * seconds:.3g} ms" for seconds in (self.seconds, self.of_others))
        if self.cause is None:
            work = f"its own work takes {own} of a step, that of the others {others}"
            return f"rank {self.rank} on {host} is no longer slow: {work}"
        return (
            f"rank {self.rank} on {host} is slow {_WORDS[self.cause]}: its own work takes {own} of a step, "
            f"{self.factor:.3g} times the {others} of the others, which wait for it"
        )


class SlowRanks:
    """Finds ranks that are slow for long enough: each once, and once more when it is no longer so."""

    def __init__(self) -> None:
        self._members: Sequence[Hashable] = ()
        self._slow: set[Hashable] = set()
        self._in_row: dict[Hashable, int] = {}  # stretches that speak for a change
        self._begin_stretch()

    def _begin_stretch(self) -> None:
        self._sum: Times | float = 0.0
        self._num, self._seconds = 0, 0.0

    def meet(self, members: Sequence[Hashable]) -> None:
        """Go on with the ranks of another world, given as names of their processes; those that left are forgotten.

        A process that was slow before is not found again.
        """
        # (Processes of containers that have one host name may have one number, too.)
        self._members = members if len({*members}) == len(members) else range(len(members))
        self._slow.intersection_update(self._members)
        self._in_row = {}
        self._begin_stretch()

    def hear(self, times: Times, num_steps: int) -> list[Found]:
        """Take what all ranks have told of `num_steps` steps, and return who has become slow, or is so no longer."""
        self._sum, self._num = self._sum + times, self._num + 1
        self._seconds += num_steps * step_seconds(times)
        if self._seconds < STRETCH_S:
            return []
        means = self._sum / self._num
        self._begin_stretch()
        return self._judged(means)

    def _judged(self, times: Times) -> list[Found]:
        known = np.flatnonzero(times[:, SAMPLES])  # a newcomer that is still given the state has no samples
        if len(known) < 2:
            return []
        times = times[known]
        # A rank with more samples takes longer, and is not slow; nor is one whose samples are few: nobody waits for it.
        alike = times.copy()
        alike[:, BY_SAMPLES] *= (times[:, SAMPLES].mean() / times[:, SAMPLES])[:, None]
        work, work_alike = times[:, _WORK].sum(axis=1), alike[:, _WORK].sum(axis=1)
        others, others_alike = median_of_others(work), median_of_others(work_alike)
        factor, factor_alike = _ratio(work, others), _ratio(work_alike, others_alike)
        less = np.minimum(factor, factor_alike)
        longer = np.minimum(work - others, work_alike - others_alike)
        slow = (less >= FACTOR) & (longer >= LEAST_S)
        well = (less < RECOVERED) | (longer < LEAST_S / 2)
        found = []
        for place, rank in enumerate(known.tolist()):
            member = self._members[rank] if self._members else rank
            was_slow = member in self._slow
            in_row = self._in_row.get(member, 0) + 1 if (well if was_slow else slow)[place] else 0
            self._in_row[member] = in_row
            if in_row < STRETCHES:
                continue
            self._in_row[member] = 0
            self._slow ^= {member}
            cause = None if was_slow else _cause(alike, place, float(longer[place]))
            numbers = float(work[place]), float(others[place]), float(factor_alike[place])
            found.append(Found(rank, cause, *numbers))
        return found


def step_seconds(times: Times) -> float:
    """Return how long a step takes, waits included; 0 where nobody has told."""
    return float(times[:, : len(PHASES)].sum(axis=1).max())


def median_of_others(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return for each of two or more values the median of the others; of an even number the upper one in the middle."""
    order = np.argsort(values, kind="stable")
    middle = (len(values) - 1) // 2
    medians = np.empty_like(values)
    medians[order[: middle + 1]] = values[order[middle + 1]]
    medians[order[middle + 1 :]] = values[order[middle]]
    return medians


def _ratio(values: npt.NDArray[np.float64], others: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return values / np.maximum(others, 1e-9)


def _cause(times: Times, place: int, longer: float) -> Cause:
    """Return what a rank, one of `times`, is mostly slow in; the load, where it mostly stands in line for a core."""
    queued = times[:, _QUEUED]
    if queued[place] - median_of_others(queued)[place] >= longer / 2:
        return "load"
    more: dict[Cause, float] = {}
    for cause, phases in _PHASES_OF.items():
        spent = times[:, [PHASES.index(phase) for phase in phases]].sum(axis=1)
        more[cause] = float(spent[place] - median_of_others(spent)[place])
    return max(more, key=lambda cause: more[cause])


def spread(times: Times) -> dict[str, list[float]] | None:
    """Return how far the ranks are apart, for a record: [least, median, most, rank of the most] seconds of a step.

    By the names of PHASES, and for `work`, which is all but the reduction. The median is that of the ranks but the one
    with the most, as in `median_of_others`. None where fewer than two ranks have told of their times.
    """
    known = times[:, SAMPLES].nonzero()[0]
    if len(known) < 2:
        return None
    if len(known) < len(times):
        times = times[known]
    seconds = np.concatenate([times[:, _WORK].sum(axis=1, keepdims=True), times[:, : len(PHASES)]], axis=1)
    in_order, slowest = np.sort(seconds, axis=0), known[seconds.argmax(axis=0)].tolist()
    of_all = in_order[[0, (len(known) - 1) // 2, -1]].round(_DECIMALS).tolist()
    return {
        name: [least, median, most, rank]
        for name, least, median, most, rank in zip((WORK, *PHASES), *of_all, slowest, strict=True)
    }
