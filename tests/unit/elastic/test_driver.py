"""What our driver gives to Horovod: ranks of workers on several hosts, and the list of hosts."""

from __future__ import annotations

import pytest

from hvd_train.elastic.driver import HostCommand, seats_of
from hvd_train.elastic.roster import Worker


def test_ranks_keep_their_order_whatever_hosts_they_are_on() -> None:
    """Local ranks count the workers of a host, cross ranks the hosts that have that local rank."""
    on = ["a", "b", "a", "c", "b", "a"]
    seats = seats_of(tuple(Worker(1000 + n, host, slot=n, started=0, heard=0) for n, host in enumerate(on)))
    assert [seat.rank for seat in seats] == [0, 1, 2, 3, 4, 5]
    assert [seat.local_rank for seat in seats] == [0, 0, 1, 0, 1, 2]
    assert [seat.local_size for seat in seats] == [3, 2, 3, 1, 2, 3]
    assert [seat.cross_rank for seat in seats] == [0, 1, 0, 2, 1, 0]
    assert [seat.cross_size for seat in seats] == [3, 3, 2, 3, 2, 1]
    assert {seat.size for seat in seats} == {6}
    assert seats[3].to_response_string() == "3,6,0,1,2,3"


def test_hosts_are_read_from_a_command() -> None:
    """NAME:SLOTS a line; a name alone has the default number of slots; no lines are no hosts."""
    assert HostCommand("printf 'a:2\\nb\\n\\n'", 4).find_available_hosts_and_slots() == {"a": 2, "b": 4}
    assert HostCommand("true", None).find_available_hosts_and_slots() == {}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("echo a:two", "which is not NAME:SLOTS"),
        ("echo first >&2; echo 'no such file' >&2; exit 1", "^no such file$"),
        ("exit 3", "ended with exit code 3"),
    ],
)
def test_a_bad_list_is_one_line(command: str, message: str) -> None:
    """The job goes on with the list before it."""
    with pytest.raises(ValueError, match=message):
        HostCommand(command, 1).find_available_hosts_and_slots()
