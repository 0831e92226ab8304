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
    """The report of one rank to all others. Its size does not depend on the number of ranks."""

    member: Member
    survives: bool = False  # whether the rank has a state of this run in memory
    step: int = 0  # steps done since the run began
    digest: str = ""  # of the state; empty if the rank has none
    reason: str = ""  # why the rank left its last world, for the user
    run_dir: Path | None = None  # if the rank knows it
    waits: tuple[int, ...] = ()  # where its program is: the label of a collective (`state.Label`), for comparison
    state_at: tuple[int, ...] = ()  # where its state is: there, or further on if another rank has sent it
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
        after = {*self.after}
        return tuple(member for member in self.before if member not in after)

    @property
    def came(self) -> tuple[Member, ...]:
        """The members of the new world that were not in the old one."""
        before = {*self.before}
        return tuple(member for member in self.after if member not in before)

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
    """Return the survivor with the most advanced state and program, the lowest rank of several."""

    def place(rank: int) -> tuple[Any, ...]:
        report = reports[rank]
        return report.survives, report.state_at, report.waits, -rank

    return max(range(len(reports)), key=place)


def survivors_differ(reports: Sequence[RankReport]) -> bool:
    """Return whether survivors have come to the same place with different weights.

    Horovod may report a broken reduction as complete (patch C6 in docs/building.md). A state that another rank has sent
    was compared then.
    """
    own = [report for report in reports if report.survives and report.state_at == report.waits]
    states = {(report.waits, report.digest) for report in own}
    return len(states) > len({waits for waits, _ in states})


def change_between(before: tuple[Member, ...], reports: Sequence[RankReport], step: int) -> Change | None:
    """Return the change after `step` steps; `before` is the last world of the most advanced rank, empty without one."""
    if not before:
        return None
    leader = reports[most_advanced(reports)]
    after = tuple(report.member for report in reports)
    return Change(before, after, leader.reason, step, steps_lost=leader.step - step)
