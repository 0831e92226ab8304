"""Which errors count as the same one, and when there are too many of them."""

from __future__ import annotations

import pytest

from hvd_train.elastic.repeated_errors import SAME_ERRORS, ErrorsInARow, Place, place_of_error
from hvd_train.elastic.worker import Worker
from hvd_train.launch.last_word import During, LastWord


def ended(during: During | None = "building", step: int = 0, code: int = 1, *, has_met: bool = False) -> Worker:
    """A worker that an error has ended; `during` None where it had no last word."""
    word = None if during is None else LastWord(code, "Traceback", during, step)
    return Worker(1000, "a", 0, started_at=0.0, heard_at=0.0, has_met=has_met, last_word=word)


def together(*members: Worker) -> None:
    """These workers were in one world."""
    for member in members:
        member.world = members


def row(*places: Place) -> ErrorsInARow:
    """Errors in these places, one after another."""
    errors = ErrorsInARow()
    for place in places:
        errors = errors.and_another(place, ended())
    return errors


def test_the_step_says_where_a_member_failed() -> None:
    """However far the others had come to one state."""
    worker = ended("training", 7)
    together(worker)
    assert place_of_error(worker, others_train=True) == 7


def test_a_member_without_a_last_word_failed_nowhere() -> None:
    """Nothing is known of its error, so no other one is the same."""
    worker = ended(None)
    together(worker)
    assert place_of_error(worker, others_train=False) is None


@pytest.mark.parametrize("during", ["building", None])
def test_a_newcomer_fails_by_itself_while_others_train(during: During | None) -> None:
    """They have been built from the same program; where nobody trains, it may be the program."""
    assert place_of_error(ended(during), others_train=True) is None
    assert place_of_error(ended(during), others_train=False) == "building"


def test_a_newcomer_that_fails_to_meet_says_something_only_if_nobody_has_met() -> None:
    """Where others have met before, the newcomer is what is new; one of those that had met speaks for the job."""
    newcomer, old = ended("meeting"), ended("meeting", has_met=True)
    together(newcomer, old)
    assert place_of_error(newcomer, others_train=True) is None
    assert place_of_error(old, others_train=True) == "meeting"
    together(newcomer, ended())
    assert place_of_error(newcomer, others_train=True) == "meeting"


def test_errors_in_one_place_are_counted() -> None:
    """From the third on, chance no longer explains them."""
    for place in (4, "building", "meeting"):
        for count in range(1, 5):
            errors = row(*[place] * count)
            assert (errors.count, errors.is_long) == (count, count >= SAME_ERRORS)


def test_an_error_elsewhere_begins_a_new_row() -> None:
    """Errors all over the place are what clusters do."""
    assert row(4, 4, 9).count == 1
    assert row(4, 4, "meeting", 4).count == 1
    assert row("building", "building", "meeting").count == 1
    assert row("meeting", "meeting", "building").count == 1
    assert row(0, "building", "meeting", 0).count == 1


def test_neighbouring_steps_are_one_place() -> None:
    """The place is that of the first of them, so that a row does not walk through the whole run."""
    assert row(4, 5, 3, 4).count == 4
    assert row(4, 5, 6).count == 1
    assert row(4, 2).count == 1


def test_a_world_that_forms_forgives_errors_of_building_only() -> None:
    """Its workers have been built; a step that fails would fail again."""
    assert row("building", "building").once_a_world_forms() == ErrorsInARow()
    assert row(4, 4).once_a_world_forms().count == 2
    assert row("meeting", "meeting").once_a_world_forms().count == 2


def test_wrong_settings_are_the_jobs_exit_code() -> None:
    """The last worker says what it was; without its word it is a fault that repeats."""
    errors = row(4, 4)
    assert errors.exit_code == 5
    assert errors.and_another(4, ended("training", 4, code=2)).exit_code == 2
    assert errors.and_another(9, ended("training", 9, code=2)).exit_code == 2
    assert errors.and_another(4, ended("training", 4, code=2)).and_another(4, ended(None)).exit_code == 5


@pytest.mark.parametrize(
    ("place", "where"),
    [(4, "in step 5"), (0, "in step 1"), ("building", "before the ranks met"), ("meeting", "when the ranks met")],
)
def test_the_user_reads_where_it_was(place: Place, where: str) -> None:
    """Steps count from 1 where people read them."""
    assert str(row(place, place, place)) == f"3 workers in a row ended with an error {where} (see above)"
