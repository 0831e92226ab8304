"""What each rank reports when the ranks of a new world meet, and what follows from the reports. Pure values.

Every rank gathers all reports, so all ranks come to the same answers: whose training state the others load, whether
the survivors can be trusted, and what to tell the user about the change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Member:
    """One process of a world, named by its host and its process number there."""

    host: str
    process: int

    def __str__(self) -> str:
        return f"{self.host} (process {self.process})"


@dataclass(frozen=True)
class RankReport:
    """What one rank tells all others when they meet: who it is, how far it has come, and why it left its last world."""

    member: Member
    has_trained: bool = False
    """Whether this process has been in a world of this training before; a newcomer has not."""
    epoch: int = 0
    step: int = 0
    """Steps done since the run began."""
    digest: str = ""
    """Digest of the rank's training state in memory; empty on a newcomer."""
    previous_members: tuple[Member, ...] = ()
    """Members of the world that the rank was in before."""
    reason: str = ""
    """Why the rank left that world."""
    waited_s: float = 0.0
    """Seconds since it left."""
    run_dir: Path | None = None
    """The run folder; None where the rank does not know it yet."""

    @property
    def progress(self) -> tuple[int, int]:
        """How far the rank has come, for comparison: the end of an epoch comes after the epoch's last step."""
        return self.step, self.epoch


@dataclass(frozen=True)
class Change:
    """The change from one world to the next, as it is reported to the user after the first step in the new world."""

    before: tuple[Member, ...]
    after: tuple[Member, ...]
    reason: str
    waited_s: float
    """Seconds from the fault, or from the request to change, until all ranks had met again."""
    step: int
    """Steps done when the ranks met."""
    steps_lost: int

    @property
    def left(self) -> tuple[Member, ...]:
        """The members of the old world that are not in the new one."""
        return tuple(member for member in self.before if member not in self.after)

    @property
    def came(self) -> tuple[Member, ...]:
        """The members of the new world that were not in the old one."""
        return tuple(member for member in self.after if member not in self.before)

    def describe(self, seconds: float) -> str:
        """Return the change in one line; `seconds` is the time from the fault to the end of the next step."""
        parts = [f"{_names(self.left)} left"] if self.left else []
        parts += [f"{_names(self.came)} came"] if self.came else []
        who = " and ".join(parts) or "the same ranks met again"
        return (
            f"world {len(self.before)} -> {len(self.after)} at step {self.step}: {who} ({self.reason}); "
            f"{seconds:.1f} s to the next step, {self.steps_lost} steps lost"
        )


def most_advanced(reports: Sequence[RankReport]) -> int:
    """Return the first of the ranks that have done the most steps; newcomers come last."""
    return max(range(len(reports)), key=lambda rank: (reports[rank].has_trained, *reports[rank].progress, -rank))


def survivors_differ(reports: Sequence[RankReport]) -> bool:
    """Return whether survivors that are equally far hold different weights.

    Then a reduction that broke was reported as complete to one of them, and none of them can be trusted (patch C6 in
    docs/building.md).
    """
    survivors = [report for report in reports if report.has_trained]
    return any(
        one.progress == other.progress and one.digest != other.digest for one in survivors for other in survivors
    )


def change_between(reports: Sequence[RankReport], step: int) -> Change | None:
    """Return what has changed since the survivors' last world, or None at the start, where nobody has trained.

    `step` is the number of steps done that the new world goes on from.
    """
    survivors = [report for report in reports if report.has_trained]
    if not survivors:
        return None
    leader = reports[most_advanced(reports)]
    return Change(
        before=leader.previous_members,
        after=tuple(report.member for report in reports),
        reason=leader.reason,
        waited_s=max(report.waited_s for report in survivors),
        step=step,
        steps_lost=leader.step - step,
    )


def _names(members: Sequence[Member]) -> str:
    shown = ", ".join(str(member) for member in members[:3])
    return shown if len(members) <= 3 else f"{shown} and {len(members) - 3} more"
