"""Find the ranks that are slower than the others, from the times that all ranks have."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvd_train.progress.clock import PHASES

Numbers = npt.NDArray[np.float64]
_UPDATES, SAMPLES, MICRO_BATCHES, _SECONDS = range(4)
FIELDS = _SECONDS + len(PHASES)
"""The times of a rank (`Split.times`): updates, samples, micro-batches, seconds of each phase."""
_GROW = [PHASES.index(phase) for phase in ("data", "forward", "backward")]  # with the work
_OWN = [number for number, phase in enumerate(PHASES) if phase != "reduction"]
_EVERY_S = 1.0  # for a rank to send its times
_WINDOW_S = 5.0
_WINDOWS = 6  # in a row that speak for a change
_SIGMAS = 3.0  # of the noise, that they must be off on average
_MEMORY = 20  # windows, for the noise
_SLOW = 1.2
_RECOVERED = 1.1
_MATTERS = 0.05  # of the time of a step


@dataclass(frozen=True)
class Slow:
    """A rank that is slower than the others, and the phase in which it loses most."""

    factor: float
    phase: str
    seconds: float  # a step in this phase
    median: float  # of the others

    def __str__(self) -> str:
        what = "code outside the passes" if self.phase == "other" else self.phase
        own, others = (f"{1000 * seconds:.3g} ms" for seconds in (self.seconds, self.median))
        return (
            f"{self.factor:.1f} times slower than the others: "
            f"{what} takes {own}, {others} on the others (median)"
        )


class Pace:
    """Compares the ranks of a world, with the same result on all of them.

    Ranks send their times once a second, so that the other steps pay nothing.

    A rank is slow if its own work takes more than 1.2 times the median of the others in each window
    of 5 s for 30 s, and more than 5% of a step longer. It has recovered if it takes at most 1.1
    times the median for 30 s. Both take longer if the times vary a lot between windows.
    """

    def __init__(self, ranks: int) -> None:
        self.window: Numbers = np.zeros((ranks, FIELDS))  # the sums of the last whole window
        # in it: the seconds of own work a step of the slowest rank, and the median
        self.spread: dict[str, float] = {}
        self.windows = 0  # whole ones so far
        self.slow: dict[int, Slow] = {}  # by rank, as they were named
        self.is_due = False  # whether the next message has the times
        self._due_at: float | None = None
        self._sums = self.window.copy()
        self._seconds = 0.0  # since the window began
        self._streaks = np.zeros(ranks)  # windows in a row that speak for a change
        self._evidence = np.zeros(ranks)  # how far from _SLOW their factors were, added logarithms
        self._logs = np.zeros(ranks)  # of the last factors
        self._moves = np.zeros((0, ranks))  # of these, from one window to the next
        self._is_warm = False
        self._changes = dict[int, Slow | None]()

    @property
    def shape(self) -> tuple[int, ...]:
        """Ranks and FIELDS."""
        return self.window.shape

    def come_to(self, seconds: float) -> None:
        """Note the seconds of training, in which all ranks agree."""
        if self._due_at is None:
            self._due_at = seconds + _EVERY_S
        self.is_due = len(self.window) > 0 and seconds >= self._due_at
        if self.is_due:
            self._due_at = seconds + _EVERY_S

    def add(self, times: npt.NDArray[np.floating]) -> None:
        """Add the times that the ranks have sent, [ranks * FIELDS]."""
        if not self._is_warm:  # the first steps pay for allocation, compilation and tuning
            self._is_warm = True
            return
        self._sums += times.reshape(self._sums.shape)
        self._seconds += sum(times[_SECONDS:FIELDS].tolist())  # a step is as long on all ranks
        if self._seconds >= _WINDOW_S:
            self._end_window()

    def take_changes(self) -> dict[int, Slow | None]:
        """Return the ranks that became slow since the last call, or recovered (with None)."""
        changes = self._changes
        self._changes = {}
        return changes

    def _end_window(self) -> None:
        self.window = self._sums
        self.windows += 1
        self._sums = np.zeros(self.window.shape)
        self._seconds = 0.0
        seconds = seconds_a_step(self.window, MICRO_BATCHES)
        own = seconds[:, _OWN].sum(1)
        self.spread = {"slowest": float(np.nanmax(own)), "median": float(np.nanmedian(own))}
        factors = np.minimum(_factors(seconds), _factors(seconds_a_step(self.window, SAMPLES)))
        before, self._logs = self._logs, np.log(np.nan_to_num(factors, nan=1.0))
        self._moves = np.vstack([self._moves, np.abs(self._logs - before)])[-_MEMORY:]
        # of normal numbers the standard deviation is 1.05 times the median move; a rank that
        # becomes slow moves once
        noise = 1.05 * np.median(self._moves, axis=0)
        is_slow = np.isin(np.arange(len(factors)), [*self.slow])
        votes = np.where(is_slow, factors <= _RECOVERED, factors > _SLOW)
        distances = np.abs(self._logs - np.log(_SLOW))
        self._streaks = np.where(votes, self._streaks + 1, 0)
        self._evidence = np.where(votes, self._evidence + distances, 0)
        is_sure = self._evidence > _SIGMAS * noise * np.sqrt(self._streaks)
        for rank in np.flatnonzero((self._streaks >= _WINDOWS) & is_sure).tolist():
            self._streaks[rank] = self._evidence[rank] = 0
            self._changes[rank] = None
            if self.slow.pop(rank, None) is None:
                self.slow[rank] = _described(seconds, rank, float(factors[rank]))
                self._changes[rank] = self.slow[rank]


def seconds_a_step(sums: Numbers, unit: int) -> Numbers:
    """Return the seconds of each rank in each phase of a step, [ranks, phases], if all had
    the same number of SAMPLES or MICRO_BATCHES. NaN for a rank without any.
    """
    work = np.where(sums[:, unit] > 0, sums[:, unit], np.nan)
    seconds: Numbers = sums[:, _SECONDS:] / np.where(sums[:, :1] > 0, sums[:, :1], np.nan)
    seconds[:, _GROW] *= (sums[:, unit].mean() / work)[:, None]
    return seconds


def _factors(seconds: Numbers) -> Numbers:
    """Return how much longer than the median of the others the own work of each rank takes;
    at most 1 if it does not matter for a step.
    """
    own = seconds[:, _OWN].sum(1)
    others = _medians_of_others(own)
    matters = own - others > _MATTERS * np.nanmean(seconds.sum(1))
    factors: Numbers = np.where(matters, own / others, np.minimum(own / others, 1))
    return factors


def _medians_of_others(values: Numbers) -> Numbers:
    """Return for each of the values, [n], the median of the others, without NaN."""
    others = np.count_nonzero(~np.isnan(values)) - 1
    if others < 1:
        return np.full(len(values), np.nan)
    ordered = np.sort(values)  # NaN last
    places = np.argsort(np.argsort(values))
    middle = [ordered[number + (places <= number)] for number in ((others - 1) // 2, others // 2)]
    medians: Numbers = (middle[0] + middle[1]) / 2
    return medians


def _described(seconds: Numbers, rank: int, factor: float) -> Slow:
    medians = np.nanmedian(np.delete(seconds, rank, axis=0), axis=0)
    phase = max(_OWN, key=lambda number: seconds[rank, number] - medians[number])
    return Slow(factor, PHASES[phase], float(seconds[rank, phase]), float(medians[phase]))
