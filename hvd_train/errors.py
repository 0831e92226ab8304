"""The errors a user can meet. Each is one line that says what, why and what to type, and has an exit code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from hvd_train.travel import may_travel


@may_travel
class HvdTrainError(Exception):
    """Base of every error this package raises on purpose; `exit_code` is what the command line returns."""

    exit_code = 1
    raised_by: int | None = None
    """The rank that raised the error, if the others did not: they only see that this rank is gone."""
    of_all_ranks = False
    """Whether all ranks find the error in the same step, so that one of them can report it."""
    reported = False
    """Whether the user has read of the error already, from this rank or another."""
    asked_to_end = False
    """Whether the launcher had asked this process to end before the training ended with this error."""

    def __init_subclass__(cls) -> None:
        may_travel(cls)


class UsageError(HvdTrainError):
    """The settings, the data or the environment cannot give a run; nothing has been started or overwritten."""

    exit_code = 2


class Untrainable(UsageError):
    """The model cannot be trained in such batches, or not on several ranks."""

    of_all_ranks = True


class RankLost(HvdTrainError):
    """A collective operation broke because another rank ended or could not be reached."""

    exit_code = 3


class ReplicasDiffer(HvdTrainError):
    """Ranks that must hold the same weights differ."""

    exit_code = 4


class FaultRepeats(HvdTrainError):
    """The same step fails repeatedly, in one world after another."""

    exit_code = 5


class Diverged(HvdTrainError):
    """Step after step has a loss or a gradient that is not finite. All ranks find it in the same step."""

    exit_code = 6
    of_all_ranks = True


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """Return the error for a name that is not in `known`: it suggests the nearest one, or else lists the first twelve.

    `kind` says what was to be named, as in "recipe".
    """
    names = sorted(known)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(names[:12])}"
    return UsageError(f"unknown {kind} {name!r}; {hint}")


def first_few(items: Sequence[object], most: int = 4) -> str:
    """Return the first `most` items in one line for the user, and how many more there are."""
    shown = ", ".join(map(str, items[:most]))
    return f"{shown} and {len(items) - most} more" if len(items) > most else shown


def counted(count: int, noun: str) -> str:
    """Return a number of things in words, as in `1 rank` and `2 ranks`."""
    return f"{count} {noun}{'s' if count != 1 else ''}"
