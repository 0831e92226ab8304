"""What each rank reports when the ranks of a new world meet, and what follows from the reports. Pure values.

Every rank gathers all reports, so all ranks come to the same answers: whose training state the others load, whether
the survivors can be trusted, and what to tell the user about the change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvd_train.errors import first_few
from hvd_train.travel import may_travel

Holds = Literal["whole", "fresh", "torn", "distrusted"]
"""What a rank has in memory: a state of all ranks after some step; the one before the first step, as it was built; a
mixture of that and another rank's, which was lost while it was sending; or a state of a meeting in which survivors of
one step turned out to differ. From the last two no training can go on."""


@may_travel
@dataclass(frozen=True)
class Member:
    """One process of a world, named by its host and its process number there."""

    host: str
    process: int

    def __str__(self) -> str:
        return f"{self.host} (process {self.process})"


@may_travel
@dataclass(frozen=True)
class RankReport:
    """What one rank tells all others when they meet: who it is, how far it has come, and why it left its last world."""

    member: Member
    has_trained: bool = False
    """Whether this process has been in a world of this training before; a newcomer has not."""
    holds: Holds = "fresh"
    """What the rank has in memory, as far as it knows."""
    epoch: int = 0
    step: int = 0
    """Steps done since the run began."""
    digest: str = ""
    """Digest of the rank's training state in memory; empty unless all of it is there."""
    arrived: int = 0
    """How much of the state of this progress a newcomer has, to which it was handed over (`Handover.arrived`)."""
    previous_members: tuple[Member, ...] = ()
    """Members of the world that the rank was in before."""
    reason: str = ""
    """Why the rank left that world."""
    waited_s: float = 0.0
    """Seconds since it left."""
    run_dir: Path | None = None
    """The run folder; None where the rank does not know it yet."""

    @property
    def survives(self) -> bool:
        """Whether the rank brings a state with it from which training can go on."""
        return self.holds == "whole"

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
        parts = [f"{first_few(self.left, 3)} left"] if self.left else []
        parts += [f"{first_few(self.came, 3)} came"] if self.came else []
        who = " and ".join(parts) or "the same ranks met again"
        return (
            f"world {len(self.before)} -> {len(self.after)} at step {self.step}: {who} ({self.reason}); "
            f"{seconds:.1f} s to the next step, {self.steps_lost} steps lost"
        )


def most_advanced(reports: Sequence[RankReport]) -> int:
    """Return the first of the ranks that have done the most steps and have their state; fresh ones come after them."""

    def standing(rank: int) -> tuple[bool, bool, tuple[int, int], int]:
        report = reports[rank]
        return report.survives, report.holds == "fresh", report.progress, -rank

    return max(range(len(reports)), key=standing)


def can_train_on(reports: Sequence[RankReport], root: int) -> bool:
    """Return whether the others may train while those that lack the state of rank `root` are given it.

    That is so where each rank has that state or none: a survivor that is behind has to take the other one first. A
    newcomer to which all was handed over, and whose state is another one all the same, is given it while all wait.
    """
    return reports[root].survives and all(
        not report.digest or report.digest == reports[root].digest for report in reports
    )


def in_common(reports: Sequence[RankReport], root: int) -> int:
    """Return how much of the state of rank `root` all those have that lack some of it (`RankReport.arrived`)."""
    return min(
        (
            report.arrived if report.progress == reports[root].progress else 0
            for report in reports
            if report.digest != reports[root].digest
        ),
        default=0,
    )


def survivors_differ(reports: Sequence[RankReport]) -> bool:
    """Return whether survivors that are equally far hold different weights, or did when ranks met before.

    Then a reduction that broke was reported as complete to one of them, and none of them can be trusted (patch C6 in
    docs/building.md). A rank that has heard of this tells those that were lost to that meeting before they had.
    """
    survivors = [report for report in reports if report.survives]
    return any(report.holds == "distrusted" for report in reports) or any(
        one.progress == other.progress and one.digest != other.digest for one in survivors for other in survivors
    )


def change_between(reports: Sequence[RankReport], step: int) -> Change | None:
    """Return what has changed since the survivors' last world, or None at the start, where nobody has trained.

    `step` is the number of steps done that the new world goes on from.
    """
    trained = [report for report in reports if report.has_trained]
    if not trained:
        return None
    leader = max(trained, key=lambda report: report.progress)
    return Change(
        before=leader.previous_members,
        after=tuple(report.member for report in reports),
        reason=leader.reason,
        waited_s=max(report.waited_s for report in trained),
        step=step,
        steps_lost=leader.step - step,
    )
