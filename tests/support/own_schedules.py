"""Schedules as users write them: some that serve, and some that cannot."""

from __future__ import annotations

import itertools

HERE = "tests.support.own_schedules"
_calls = itertools.count()


def triangle(epochs_done: float, epochs: int) -> float:
    """Rise to twice the peak in the middle of the run, and fall."""
    return 2 - 4 * abs(epochs_done / epochs - 0.5)


def halves(epochs_done: float, epochs: int) -> float:
    """Fall by half every second epoch, however many there are."""
    return float(0.5 ** (epochs_done // 2))


def counts(epochs_done: float, epochs: int) -> float:
    """Depend on how often it was called."""
    return 1 / (1 + next(_calls))


def negative(epochs_done: float, epochs: int) -> float:
    """Fall below zero in the last quarter."""
    return 3 - 4 * epochs_done / epochs


def text(epochs_done: float, epochs: int) -> str:
    """Return no number."""
    return "fast"


def nothing(epochs_done: float, epochs: int) -> None:
    """Forget to return."""


def fails(epochs_done: float, epochs: int) -> float:
    """Look up what is not there."""
    return {}["x"]  # type: ignore[no-any-return]


def of_steps(step: int) -> float:
    """Take something else."""
    return 1.0
