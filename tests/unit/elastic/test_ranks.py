"""The ranks of workers on several hosts."""

from __future__ import annotations

from hvd_train.elastic.ranks import RankAssignment, assign_ranks, starting
from hvd_train.elastic.worker import Worker


def test_ranks_keep_their_order_whatever_hosts_they_are_on() -> None:
    """Local ranks count the workers of a host, cross ranks the hosts that have that local rank."""
    on = ["a", "b", "a", "c", "b", "a"]
    workers = [Worker(1000 + n, host, slot=n, started_at=0, heard_at=0) for n, host in enumerate(on)]
    assignments = assign_ranks(workers)
    assert [ranks.hostname for ranks in assignments] == on
    assert [ranks.rank for ranks in assignments] == [0, 1, 2, 3, 4, 5]
    assert [ranks.worker for ranks in assignments] == [1000, 1001, 1002, 1003, 1004, 1005]
    assert [ranks.local_rank for ranks in assignments] == [0, 0, 1, 0, 1, 2]
    assert [ranks.local_size for ranks in assignments] == [3, 2, 3, 1, 2, 3]
    assert [ranks.cross_rank for ranks in assignments] == [0, 1, 0, 2, 1, 0]
    assert [ranks.cross_size for ranks in assignments] == [3, 3, 2, 3, 2, 1]
    assert {ranks.size for ranks in assignments} == {6}


def test_a_process_that_starts_has_its_number_for_a_local_rank() -> None:
    """By that the driver knows it when it asks for its first rank."""
    ranks = starting(Worker(1003, "a", slot=1, started_at=0, heard_at=0), 4, {"X": "1"})
    alone = {"rank": 0, "size": 1, "cross_rank": 0, "cross_size": 1}
    assert ranks == RankAssignment("a", local_rank=1003, local_size=4, worker=1003, environment={"X": "1"}, **alone)
