"""Which rank sends its state at a rendezvous, whether survivors agree, and what the user reads."""

from dataclasses import replace

from hvd_train.errors import ReplicasDiffer
from hvd_train.membership import Change, Member, RankReport, change_between, decide

A, B, C = (Member(host, 1) for host in "abc")


def survivor(member: Member, step: int, epoch: int = 0, digest: str = "x") -> RankReport:
    why = "a rank was lost"
    report = RankReport(member, True, step, digest, reason=why)
    return replace(report, waits=(epoch, 2, step, 0), state_at=(epoch, 2, step, 0))


def behind(member: Member, step: int, state_at: int, digest: str = "x") -> RankReport:
    """Return the report of a survivor that has loaded a state which is
    further on than its program.
    """
    return replace(
        survivor(member, step, digest=digest), step=state_at, state_at=(0, 2, state_at, 0)
    )


def root_of(reports: list[RankReport]) -> int:
    return decide(reports).root


def survivors_differ(reports: list[RankReport]) -> bool:
    try:
        decide(reports)
    except ReplicasDiffer:
        return True
    return False


def change(reports: list[RankReport], step: int = 7) -> Change:
    found = change_between((A, B), reports, root_of(reports), step=step)
    assert found is not None
    return found


def test_the_most_advanced_rank_sends_its_state() -> None:
    assert root_of([survivor(A, 6), survivor(B, 7)]) == 1
    assert root_of([survivor(A, 7), survivor(B, 7)]) == 0
    assert root_of([survivor(A, 7), survivor(B, 7, epoch=1)]) == 1
    assert root_of([RankReport(C), survivor(B, 0)]) == 1
    assert root_of([RankReport(C, step=8), survivor(B, 7)]) == 1


def test_a_state_that_was_received_counts_before_the_program_is_there() -> None:
    """The rank that sent it may be gone when others have not loaded it yet."""
    assert root_of([survivor(A, 6), behind(B, 6, state_at=7), RankReport(C)]) == 1
    assert root_of([behind(A, 6, state_at=7), survivor(B, 7)]) == 1
    assert not survivors_differ(
        [survivor(A, 7), behind(B, 6, state_at=7), survivor(C, 6, digest="y")]
    )
    assert not survivors_differ([behind(B, 6, state_at=7), survivor(C, 6, digest="y")])


def test_survivors_of_one_step_with_different_weights_are_detected() -> None:
    """They may differ if their progress differs."""
    assert survivors_differ([survivor(A, 7), survivor(B, 7, digest="y")])
    assert not survivors_differ([survivor(A, 7), survivor(B, 6, digest="y"), RankReport(C)])
    assert not survivors_differ([survivor(A, 7, epoch=1), survivor(B, 7, epoch=0, digest="y")])


def test_a_change_names_who_left_and_who_came() -> None:
    assert change_between((), [RankReport(A), RankReport(B)], 0, step=0) is None
    for after, who in (
        (
            [survivor(A, 7), RankReport(C)],
            "2 -> 2 at step 7: b (process 1) left and c (process 1) came",
        ),
        ([survivor(A, 7), survivor(B, 7)], "2 -> 2 at step 7: the same ranks again"),
    ):
        line = f"world {who} (a rank was lost); 1.2 s to the next step, 0 steps lost"
        assert change(after).describe(1.23) == line
    assert change([survivor(A, 7)], step=5).steps_lost == 2


def test_a_change_is_what_the_most_advanced_rank_has_seen() -> None:
    earlier = replace(survivor(B, 5), reason="its network was away")
    found = change([earlier, survivor(A, 7)])
    assert (found.reason, found.steps_lost) == ("a rank was lost", 0)
