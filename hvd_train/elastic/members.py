"""The reports of ranks at a rendezvous, by which all ranks decide alike. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_train.errors import first_few, may_travel


@may_travel
@dataclass(frozen=True)
class Member:
    """One process of a world, by its host and process id."""

    host: str
    process: int

    def __str__(self) -> str:
        return f"{self.host} (process {self.process})"


@may_travel
@dataclass(frozen=True)
class RankReport:
    """The report of one rank to all others."""

    member: Member
    survives: bool = False  # whether the rank has a state of this run in memory
    step: int = 0  # steps done since the run began
    digest: str = ""  # of the state; empty if the rank has none
    previous_members: tuple[Member, ...] = ()  # of the rank's last world; a newcomer has none
    reason: str = ""  # why the rank left its last world, for the user
    run_dir: Path | None = None  # if the rank knows it
    waits: tuple[int, ...] = ()  # where its program is: the label of a collective (`state.Label`), for comparison
    session: int = 1  # the number of its training in its program
    ended: Any = None  # the result of the training before


@dataclass(frozen=True)
class Change:
    """A change of world, for the user."""

    before: tuple[Member, ...]
    after: tuple[Member, ...]
    reason: str
    step: int  # steps done at the start of the new world
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
        """Return the change in one line; `seconds` have passed since the fault."""
        moves = ((self.left, "left"), (self.came, "came"))
        parts = [f"{first_few(members, 3)} {how}" for members, how in moves if members]
        who = " and ".join(parts) or "the same ranks again"
        return (
            f"world {len(self.before)} -> {len(self.after)} at step {self.step}: {who} ({self.reason}); "
            f"{seconds:.1f} s to the next step, {self.steps_lost} steps lost"
        )


def most_advanced(reports: Sequence[RankReport]) -> int:
    """Return the survivor with the most steps, the lowest rank if several have them."""
    return max(range(len(reports)), key=lambda rank: (reports[rank].survives, reports[rank].waits, -rank))


def survivors_differ(reports: Sequence[RankReport]) -> bool:
    """Return whether survivors at the same place have different weights.

    Horovod may report a broken reduction as complete (patch C6 in docs/building.md).
    """
    states = {(report.waits, report.digest) for report in reports if report.survives}
    return len(states) > len({waits for waits, _ in states})


def change_between(reports: Sequence[RankReport], step: int) -> Change | None:
    """Return the change since the last world after `step` steps, or None if no rank has trained."""
    trained = [report for report in reports if report.previous_members]
    if not trained:
        return None
    leader = max(trained, key=lambda report: report.waits)
    after = tuple(report.member for report in reports)
    return Change(leader.previous_members, after, leader.reason, step, steps_lost=leader.step - step)
