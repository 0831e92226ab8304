"""Who leads when ranks meet, whether they can be trusted, and what the user is told."""

from __future__ import annotations

from dataclasses import replace

from hvd_train.elastic.members import (
    Holds,
    Member,
    RankReport,
    can_train_on,
    change_between,
    in_common,
    most_advanced,
    survivors_differ,
)

A, B, C = (Member(host, 1) for host in "abc")


def survivor(member: Member, step: int, epoch: int = 0, digest: str = "x", holds: Holds = "whole") -> RankReport:
    """A survivor of the world of a and b."""
    return RankReport(
        member,
        True,
        holds,
        epoch,
        step,
        digest,
        previous_members=(A, B),
        reason="a rank was lost",
        waited_s=0.5,
    )


def test_whoever_has_done_most_gives_its_state() -> None:
    """Whatever its rank; an epoch's end counts after its last step, and a newcomer never leads."""
    assert most_advanced([survivor(A, 6), survivor(B, 7)]) == 1
    assert most_advanced([survivor(A, 7), survivor(B, 7)]) == 0
    assert most_advanced([survivor(A, 7), survivor(B, 7, epoch=1)]) == 1
    assert most_advanced([RankReport(C), survivor(B, 0)]) == 1
    assert most_advanced([RankReport(C, holds="torn"), survivor(B, 0)]) == 1
    assert most_advanced([RankReport(C, holds="torn"), RankReport(B)]) == 1


def test_survivors_of_one_step_with_other_weights_are_not_trusted() -> None:
    """A broken reduction was reported as done to one of them; one step apart they may differ."""
    assert survivors_differ([survivor(A, 7), survivor(B, 7, digest="y")])
    assert not survivors_differ([survivor(A, 7), survivor(B, 6, digest="y"), RankReport(C)])


def test_a_survivor_that_has_ended_the_epoch_may_differ_from_one_that_has_not() -> None:
    """Both have done its last step; the means of the epoch begin anew for one of them."""
    assert not survivors_differ([survivor(A, 7, epoch=1), survivor(B, 7, epoch=0, digest="y")])
    assert survivors_differ([survivor(A, 7, epoch=1), survivor(B, 7, epoch=1, digest="y")])


def test_survivors_that_differed_are_not_trusted_at_the_next_meeting_either() -> None:
    """One of them has meanwhile loaded the last commit, another was lost to that meeting before it heard of it."""
    assert survivors_differ([survivor(A, 5, holds="distrusted"), survivor(B, 7)])
    assert not survivors_differ([survivor(A, 5), survivor(B, 7), RankReport(C, holds="torn")])


def test_the_others_train_on_while_a_newcomer_alone_lacks_the_state() -> None:
    """A survivor that is behind, and one to whom another state was handed over, are given it while all wait."""
    assert can_train_on([survivor(A, 7), survivor(B, 7), RankReport(C)], 0)
    assert not can_train_on([survivor(A, 7), survivor(B, 6, digest="y"), RankReport(C)], 0)
    assert not can_train_on([survivor(A, 7), replace(RankReport(C), digest="y")], 0)
    assert not can_train_on([RankReport(C), RankReport(A)], 0), "nobody has a state to go on with"


def test_as_much_is_sent_anew_as_one_of_those_that_lack_it_has_not() -> None:
    """What all newcomers have of this very step stays; where none lacks anything, there is nothing to send."""
    root = survivor(A, 7)
    at_7, at_6 = (replace(RankReport(C), epoch=0, step=step, digest="part", arrived=5) for step in (7, 6))
    assert in_common([root, at_7], 0) == 5
    assert in_common([at_7, root, replace(at_7, arrived=3)], 1) == 3
    assert in_common([root, at_7, at_6], 0) == 0
    assert in_common([root, at_7, RankReport(B)], 0) == 0
    assert in_common([root, survivor(B, 7)], 0) == 0


def test_a_change_names_who_left_and_who_came() -> None:
    """With the seconds since the fault and the steps that were lost."""
    change = change_between([survivor(A, 7), RankReport(C)], step=7)
    assert change is not None
    assert (change.left, change.came, change.steps_lost) == ((B,), (C,), 0)
    assert change.describe(1.23) == (
        "world 2 -> 2 at step 7: b (process 1) left and c (process 1) came (a rank was lost); "
        "1.2 s to the next step, 0 steps lost"
    )
    assert change_between([RankReport(A), RankReport(B)], step=0) is None
    for after, who in (
        ([survivor(A, 7), survivor(B, 7)], "2 -> 2 at step 7: the same ranks met again"),
        ([survivor(A, 7)], "2 -> 1 at step 7: b (process 1) left"),
        ([survivor(A, 7), survivor(B, 7), RankReport(C)], "2 -> 3 at step 7: c (process 1) came"),
    ):
        change = change_between(after, step=7)
        assert change is not None
        rest = " (a rank was lost); 2.0 s to the next step, 0 steps lost"
        assert change.describe(2.0) == f"world {who}{rest}"
    went_back = change_between([survivor(A, 7)], step=5)
    assert went_back is not None
    assert went_back.steps_lost == 2


def test_a_change_counts_from_the_first_that_noticed() -> None:
    """A rank that comes late to the meeting has waited for less; a newcomer has waited for nobody."""
    late = replace(survivor(B, 7), waited_s=0.1)
    for reports in ([survivor(A, 7), late, RankReport(C)], [late, survivor(A, 7), RankReport(C, waited_s=9.0)]):
        change = change_between(reports, step=7)
        assert change is not None
        assert change.waited_s == 0.5


def test_a_change_is_told_as_the_rank_that_is_ahead_has_seen_it() -> None:
    """One that lost its world some steps before was in another one, and left it for another reason."""
    behind = replace(survivor(B, 5), previous_members=(B, C), reason="its network was away")
    for reports in ([survivor(A, 7), behind], [behind, survivor(A, 7)]):
        change = change_between(reports, step=7)
        assert change is not None
        assert (change.before, change.reason, change.steps_lost) == ((A, B), "a rank was lost", 0)


def test_of_many_that_come_or_leave_three_are_named() -> None:
    """A line for a thousand ranks is as long as one for four."""
    many = [RankReport(Member(f"h{n}", 1)) for n in range(5)]
    for count, names in (
        (3, "h0 (process 1), h1 (process 1), h2 (process 1) came"),
        (5, "h2 (process 1) and 2 more came"),
    ):
        change = change_between([survivor(A, 7), survivor(B, 7), *many[:count]], step=7)
        assert change is not None
        assert names in change.describe(1.0)
    change = change_between([survivor(A, 7), survivor(B, 7), *many[:4]], step=7)
    assert change is not None
    assert "and 1 more came" in change.describe(1.0)
