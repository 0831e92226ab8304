"""Who is in the world: what each rank says of itself when ranks meet, and what follows from it. Pure values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Member:
    """A process that trains."""

    host: str
    process: int

    def __str__(self) -> str:
        return f"{self.host} (process {self.process})"


@dataclass(frozen=True)
class Standing:
    """What one rank says when all meet. `lived`: it has been in a world of this training before."""

    member: Member
    lived: bool = False
    epoch: int = 0
    step: int = 0
    digest: str = ""
    """Of its live weights, where it has lived."""
    before: tuple[Member, ...] = ()
    """The members of the world it was in."""
    why: str = ""
    """Why it left that one."""
    waited: float = 0.0
    """Seconds since it did."""
    run_dir: Path | None = None
    """The run folder, where it knows it."""

    @property
    def progress(self) -> tuple[int, int]:
        """How far it is; an epoch's end comes after its last step."""
        return self.step, self.epoch


@dataclass(frozen=True)
class Change:
    """One world after another, as the user is told of it once the first step in the new one is done."""

    before: tuple[Member, ...]
    after: tuple[Member, ...]
    why: str
    waited: float
    """Seconds from the fault or the wish to change until all had met again."""
    step: int
    """Steps done when they met."""
    steps_lost: int

    @property
    def left(self) -> tuple[Member, ...]:
        """Who is no longer there."""
        return tuple(member for member in self.before if member not in self.after)

    @property
    def came(self) -> tuple[Member, ...]:
        """Who is new."""
        return tuple(member for member in self.after if member not in self.before)

    def describe(self, seconds: float) -> str:
        """In one line; `seconds` from the fault to the end of the next step."""
        parts = [f"{_names(self.left)} left"] if self.left else []
        parts += [f"{_names(self.came)} came"] if self.came else []
        who = " and ".join(parts) or "the same ranks met again"
        return (
            f"world {len(self.before)} -> {len(self.after)} at step {self.step}: {who} ({self.why}); "
            f"{seconds:.1f} s to the next step, {self.steps_lost} steps lost"
        )


def most_advanced(standings: Sequence[Standing]) -> int:
    """The first rank among those that have done most; one that has not lived counts last."""
    return max(range(len(standings)), key=lambda rank: (standings[rank].lived, *standings[rank].progress, -rank))


def torn(standings: Sequence[Standing]) -> bool:
    """Whether survivors of one step hold different weights: a broken reduction was reported as done to one of them.

    Then none of them can be trusted (fact C6 of docs/building.md).
    """
    survivors = [standing for standing in standings if standing.lived]
    return any(
        one.progress == other.progress and one.digest != other.digest for one in survivors for other in survivors
    )


def change_between(standings: Sequence[Standing], step: int) -> Change | None:
    """What has changed since the survivors' last world; None where there are none, at the start."""
    survivors = [standing for standing in standings if standing.lived]
    if not survivors:
        return None
    best = standings[most_advanced(standings)]
    return Change(
        before=best.before,
        after=tuple(standing.member for standing in standings),
        why=best.why,
        waited=max(standing.waited for standing in survivors),
        step=step,
        steps_lost=best.step - step,
    )


def _names(members: Sequence[Member]) -> str:
    shown = ", ".join(str(member) for member in members[:3])
    return shown if len(members) <= 3 else f"{shown} and {len(members) - 3} more"
