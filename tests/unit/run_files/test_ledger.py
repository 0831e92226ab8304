"""What the ledger holds however a process ended, and what an audit of it finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvd_train.errors import UsageError
from hvd_train.run_files.ledger import Entry, LedgerFile, audit, audit_entries

FIRST, SECOND = Entry(0, 1, 2, (3, 1)), Entry(0, 2, 2, (0, 2))
THIRD, FOURTH = Entry(1, 3, 1, (0, 1)), Entry(1, 4, 3, (2, 3))
ALL = [FIRST, SECOND, THIRD, FOURTH]


def lines(folder: Path) -> list[dict[str, object]]:
    """Return the objects in ledger.jsonl."""
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


def test_a_line_has_epoch_step_world_size_and_samples(tmp_path: Path) -> None:
    """Each line is a JSON object that anyone can read."""
    ledger = LedgerFile(tmp_path, 0)
    ledger.write(FIRST)
    ledger.close()
    assert lines(tmp_path) == [{"epoch": 0, "step": 1, "world_size": 2, "samples": [3, 1]}]


def test_what_a_lost_rank_did_not_write_is_written_by_its_successor(tmp_path: Path) -> None:
    """The state brings the entries: a torn last line is made whole, and steps that it has not done are removed."""
    (tmp_path / "ledger.jsonl").write_text(FIRST.line() + SECOND.line()[:20])
    ledger = LedgerFile(tmp_path, 3)
    for entry in (FIRST, SECOND, THIRD):
        ledger.write(entry)
    ledger.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
    LedgerFile(tmp_path, 2).close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_an_exact_run() -> None:
    """Every sample comes once in every epoch, whatever the world size."""
    report = audit_entries(ALL, 4)
    assert report.faults == ()
    assert str(report) == (
        "exact: every one of 4 samples counted once in each of 2 finished epochs (4 steps, world sizes 1, 2, 3)"
    )
    assert audit_entries(ALL[:3], 4).faults == ()  # an epoch under way
    assert audit_entries(ALL[:3], 4).epochs == 1


@pytest.mark.parametrize(
    ("entries", "fault"),
    [
        ([FIRST, Entry(0, 2, 2, (0, 1)), THIRD], "epoch 0: 1 samples more than once"),
        ([FIRST, Entry(0, 2, 2, (0,)), THIRD], "epoch 0: 1 samples never"),
        ([FIRST, Entry(0, 2, 2, (0, 9)), THIRD], "1 that do not exist"),
        ([FIRST, THIRD], "line 2 is of step 3"),
        ([FIRST, FIRST], "line 2 is of step 1"),
    ],
)
def test_what_is_wrong_is_named(entries: list[Entry], fault: str) -> None:
    """A fault names samples that were lost, came twice or do not exist, and steps that are missing or come twice."""
    report = audit_entries(entries, 4)
    assert any(fault in line for line in report.faults), report
    assert str(report).startswith("NOT exact: ")


def test_without_a_ledger_the_user_is_told_how_to_have_one(tmp_path: Path) -> None:
    """The error says what is missing; there is neither a traceback nor a verdict."""
    with pytest.raises(UsageError, match="train with --ledger"):
        audit(tmp_path)
    (tmp_path / "ledger.jsonl").write_text("what\n" + FIRST.line())
    (tmp_path / "metrics.jsonl").write_text('{"name": "start", "num_samples": 4}\n')
    with pytest.raises(UsageError, match="line 1 is not a step"):
        audit(tmp_path)
