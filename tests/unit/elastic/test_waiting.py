"""What the user reads while a job waits for workers."""

from __future__ import annotations

import pytest

from hvd_train.elastic.waiting import EVERY_S, SOON_S, Wait


def wait(**changes: object) -> Wait:
    """A job of `-np 4` on two slots, whose two workers are ready, in its first seconds."""
    values = {"ready": 2, "starting": 0, "slots": 2, "wanted": 4, "least": 1, "is_first": True}
    values |= {"starts_in_s": 55.2, "ends_in_s": 590.0}
    return Wait(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("case", "line"),
    [
        (
            wait(),
            "2 of 4 are ready; the hosts have 2 slots; in 55 s the training starts with those that are ready. "
            "Add hosts to the list, or give -np 2",
        ),
        (
            wait(starting=2, ready=0, least=4),
            "0 of 4 are ready, 2 are starting; the hosts have 2 slots; if there are fewer than 4 in 590 s, the job "
            "ends. Add hosts to the list, or give -np 2 --min-np 2",
        ),
        (
            wait(ready=1, slots=1, wanted=2, least=2, is_first=False),
            "1 of 2 are ready; the hosts have 1 slot; if there are fewer than 2 in 590 s, the job ends. "
            "Add hosts to the list, or give --min-np 1",
        ),
        (
            wait(ready=2, slots=2, wanted=4, least=2),
            "2 of 4 are ready; the hosts have 2 slots; in 55 s the training starts with those that are ready. "
            "Add hosts to the list, or give -np 2",
        ),
        (
            wait(ready=0, slots=0),
            "0 of 4 are ready; the hosts have 0 slots; if there are fewer than 1 in 590 s, the job ends. "
            "Add hosts to the list",
        ),
        (
            wait(ready=0, starting=2, starts_in_s=58.0),
            "0 of 4 are ready, 2 are starting; the hosts have 2 slots; in 58 s the training starts with those that are "
            "ready. Add hosts to the list, or give -np 2",
        ),
        (
            wait(ready=2, starting=2, slots=4, starts_in_s=0.7),
            "2 of 4 are ready, 2 are starting; the hosts have 4 slots; in 1 s the training starts with those that are "
            "ready",
        ),
        (
            wait(ready=0, starting=4, slots=4, starts_in_s=-5.0),
            "0 of 4 are ready, 4 are starting; the hosts have 4 slots",
        ),
        (
            wait(ready=1, starting=1, slots=2, wanted=2, least=2, is_first=False),
            "1 of 2 are ready, 1 is starting; the hosts have 2 slots",
        ),
    ],
)
def test_what_there_is_until_when_and_what_to_type(case: Wait, line: str) -> None:
    """All flags that must change are named, and only these; nothing is asked of the user where slots suffice."""
    assert case.describe() == f"waiting for workers: {line}"


def test_it_is_told_soon_where_waiting_alone_does_not_help() -> None:
    """Workers that build are no news for a minute; all is said again once a minute."""
    short, building = wait(), wait(ready=1, starting=3, slots=4)
    assert not short.is_due(SOON_S - 0.1, None) and short.is_due(SOON_S, None)
    assert not building.is_due(EVERY_S - 0.1, None) and building.is_due(EVERY_S, None)
    assert not short.is_due(100.0, EVERY_S - 0.1) and short.is_due(100.0, EVERY_S)
