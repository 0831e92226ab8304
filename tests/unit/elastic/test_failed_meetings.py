"""Who is left out after meetings that have failed, and for how long."""

from __future__ import annotations

from hvd_train.elastic.failed_meetings import MEETINGS, FailedMeetings
from hvd_train.elastic.worker import Worker


def member(number: int, *, has_met: bool) -> Worker:
    """A member of the world that could not meet."""
    return Worker(number, "a", number, started_at=0.0, heard_at=0.0, has_met=has_met)


def test_nobody_is_left_out_before_the_third_failure() -> None:
    """A link may be slow once; three failures in a row are somebody's."""
    old, new = member(1, has_met=True), member(2, has_met=False)
    failed = FailedMeetings()
    for _ in range(MEETINGS - 1):
        failed = failed.and_another()
        assert failed.to_leave_out([old, new], []) == []
    assert failed.and_another().to_leave_out([old, new], []) == [new]
    assert failed.and_another().to_leave_out([new, old], []) == [new], "wherever in the order of ranks it is"


def test_all_that_are_new_are_left_out() -> None:
    """Which of them it is, nobody knows; they come back one at a time."""
    old, two, three = member(1, has_met=True), member(2, has_met=False), member(3, has_met=False)
    assert FailedMeetings(MEETINGS).to_leave_out([two, old, three], []) == [two, three]


def test_where_nobody_is_new_or_everybody_the_last_rank_is_left_out() -> None:
    """Rank 0, which holds the run folder, stays."""
    for has_met in (True, False):
        members = [member(number, has_met=has_met) for number in range(3)]
        assert FailedMeetings(MEETINGS).to_leave_out(members, []) == members[-1:]


def test_one_failure_is_enough_for_whoever_was_left_out_before() -> None:
    """It is on trial until it has met; those that have met since are not."""
    old, new = member(1, has_met=True), member(2, has_met=False)
    assert FailedMeetings(1).to_leave_out([old, new], [new]) == [new]
    assert FailedMeetings(1).to_leave_out([old, new], [old]) == []


def test_a_rank_that_is_alone_is_never_left_out() -> None:
    """The job would have nobody left."""
    alone = member(1, has_met=False)
    assert FailedMeetings(MEETINGS + 1).to_leave_out([alone], [alone]) == []


def test_if_it_fails_again_without_them_somebody_else_goes_at_once() -> None:
    """They were innocent then."""
    members = [member(number, has_met=True) for number in range(3)]
    failed = FailedMeetings(MEETINGS).without_those().and_another()
    assert failed.to_leave_out(members[:-1], []) == [members[1]]
    assert FailedMeetings(MEETINGS).without_those().to_leave_out(members[:-1], []) == [], "it has not failed again"


def test_the_user_reads_how_often_it_was() -> None:
    """Once is not worth a number."""
    assert str(FailedMeetings(1)) == ""
    assert str(FailedMeetings(3)) == ", 3 times in a row"
