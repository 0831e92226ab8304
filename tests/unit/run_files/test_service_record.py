"""What a run folder remembers of its run at a service."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_train.run_files.records import Numbers
from hvd_train.run_files.service_record import ServiceRecord
from tests.support.full_disk import no_room

PATH = Path("service.json")


def numbers(step: int, kind: str = "step") -> Numbers:
    """Return numbers of a step."""
    return Numbers(kind, step, 1, 1e9, {"a": 1.0})


def test_whoever_goes_on_knows_what_was_sent() -> None:
    """Each kind by itself: the evaluation after an epoch belongs to a step whose numbers were sent before."""
    record = ServiceRecord(PATH)
    assert record.id is None
    assert record.is_new(numbers(0))
    record.begin("abc")
    record.sending([numbers(10), numbers(20)])
    later = ServiceRecord(PATH)
    assert later.id == "abc"
    assert [later.is_new(numbers(step)) for step in (10, 20, 30)] == [False, False, True]
    assert later.is_new(numbers(20, "epoch"))


def test_a_new_run_at_the_service_has_nothing_yet() -> None:
    """The steps that another one was sent count as new."""
    record = ServiceRecord(PATH)
    record.begin("abc")
    record.sending([numbers(10)])
    record.begin("def")
    assert ServiceRecord(PATH).is_new(numbers(10))


@pytest.mark.parametrize("text", ["", "[]", '{"id": 3, "sent": {"step": "x"}}', "[" * 10_000, '{"id": "a"}'])
def test_a_file_that_is_none_of_ours_is_no_record(text: str) -> None:
    """Anybody may have written it; the run begins anew at the service."""
    PATH.write_text(text)
    assert ServiceRecord(PATH).is_new(numbers(0))


def test_a_full_disk_does_not_keep_numbers_back() -> None:
    """They are sent; only who goes on after a crash may send them again."""
    record = ServiceRecord(PATH)
    record.begin("abc")
    with no_room():
        record.sending([numbers(10)])
    assert not record.is_new(numbers(10))
