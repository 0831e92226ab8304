"""What a worker's exit code says, beside its last word."""

from __future__ import annotations

import os

import pytest

from hvd_train.elastic.worker import COMMITTED, UNRECOVERABLE, WRONG_SETTINGS, Worker
from hvd_train.errors import Diverged, FaultRepeats, HvdTrainError, RankLost, ReplicasDiffer, StateLost, UsageError
from hvd_train.launch.last_word import LastWord


def worker(word: LastWord | None = None) -> Worker:
    """A worker on host a that has said this, if anything."""
    return Worker(1000, "a", 2, started_at=0.0, heard_at=0.0, last_word=word)


def test_it_is_named_by_its_host_and_slot() -> None:
    """As the lines that its process prints are."""
    assert str(worker()) == "a[2]"


@pytest.mark.parametrize(
    ("word", "exit_code", "meant"),
    [
        (None, 139, 139),
        (None, 1, 1),
        (LastWord(0), 139, 0),
        (LastWord(143), -6, 143),
        (LastWord(0), 128, 0),
        (LastWord(0), 1, 1),
        (LastWord(143), 0, 0),
        (LastWord(143), 127, 127),
        (LastWord(2, "bad"), 1, 2),
        (LastWord(1, "Traceback"), 0, 1),
    ],
)
def test_a_crash_at_exit_hides_no_exit_code(word: LastWord | None, exit_code: int, meant: int) -> None:
    """A process that crashes after its last word ends as that says; else its own code counts, but after an error."""
    assert worker(word).meant_exit_code(exit_code) == meant


@pytest.mark.parametrize(
    ("word", "failed"),
    [
        (None, False),
        (LastWord(1, "x", "meeting"), True),
        (LastWord(1, "x", "training", 3), False),
        (LastWord(1), False),
    ],
)
def test_whether_it_failed_to_meet_is_in_its_last_word(word: LastWord | None, failed: bool) -> None:
    """A worker that has said nothing may have failed anywhere."""
    assert worker(word).failed_to_meet is failed


def test_errors_that_no_other_worker_would_mend_end_the_job() -> None:
    """And only those: a lost rank, or a state that is lost with its ranks, is what new workers are for."""
    assert {error.exit_code for error in (ReplicasDiffer, FaultRepeats, Diverged)} | {os.EX_IOERR} == {*UNRECOVERABLE}
    assert UsageError.exit_code == WRONG_SETTINGS
    others = {HvdTrainError.exit_code, RankLost.exit_code, StateLost.exit_code}
    assert not others & {WRONG_SETTINGS, *UNRECOVERABLE, *COMMITTED}
