"""How long to wait before the next attempt."""

from __future__ import annotations

from hvd_train.elastic.back_off import wait_s


def test_waits_double_up_to_the_longest() -> None:
    """What flaps costs the others ever less, and is never given up."""
    assert [wait_s(1, 60, times) for times in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_days_of_attempts_wait_no_longer() -> None:
    """Nor do they end in an error: a host that fails once a minute has failed 1,440 times within a day."""
    for times in (100, 1023, 1024, 1440, 10**6):
        assert wait_s(1, 60, times) == 60
