"""What an audit says in words, and where it learns what it must know of the run."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvd_train.errors import UsageError
from hvd_train.run_files.ledger import Audit, Listed, audit, audit_entries, parse
from tests.unit.run_files.test_ledger import FIRST, SECOND, SEED, exact

START = {"kind": "event", "name": "start", "num_samples": 100, "seed": SEED}


def write(folder: Path, *metrics: object, times: int = 1) -> None:
    """Write a run of two epochs with these lines of metrics.jsonl."""
    text = [line if isinstance(line, str) else json.dumps(line) for line in metrics]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in text))
    (folder / "ledger.jsonl").write_text("".join(entry.line() for entry in exact(2, times=times)))


@pytest.mark.parametrize(
    "noise",
    [
        '"start" torn',
        '["start", "num_samples"]',
        {"kind": "step", "step": 1},
        {"kind": "event", "name": "start"},
        {"kind": "event", "name": "note", "message": "start", "num_samples": 7},
    ],
    ids=str,
)
def test_the_start_of_the_run_is_found_among_other_lines(noise: object, tmp_path: Path) -> None:
    """Whatever stands before and after it."""
    write(tmp_path, noise, START, noise)
    assert (audit(tmp_path).faults, audit(tmp_path).num_samples) == ((), 100)


def test_the_last_start_counts(tmp_path: Path) -> None:
    """A run that was begun anew in its folder may have another training set."""
    write(tmp_path, {**START, "num_samples": 90, "seed": 1}, START)
    assert audit(tmp_path).faults == ()


def test_a_run_with_repeated_augmentation_is_judged_as_one(tmp_path: Path) -> None:
    """How often each sample comes is in its records, and in the verdict."""
    write(tmp_path, {**START, "repeated_augmentation": 2}, times=2)
    assert str(audit(tmp_path)) == (
        "exact: every one of 100 samples counted 2 times in 2 epochs, of 2 finished epochs (20 steps, world sizes 2)"
    )
    write(tmp_path, START, times=2)
    assert audit(tmp_path).faults != ()


def test_the_first_three_faults_are_shown() -> None:
    """A run in which all is wrong has no screen full of them."""
    audited = Audit(1, 10, 100, (1,), ("a", "b", "c", "d"))
    assert str(audited) == "NOT exact: a; b; c"
    assert audited.faults[3] == "d"


def test_large_numbers_can_be_read() -> None:
    """With a comma for each thousand."""
    assert str(Audit(90, 450_360, 1_281_167, (8, 16), ())) == (
        "exact: every one of 1,281,167 samples counted once in each of 90 finished epochs "
        "(450,360 steps, world sizes 8, 16)"
    )


def test_lists_of_repeated_augmentation_are_judged_by_rounds() -> None:
    """Version 0.1.0 wrote them: a round of two epochs under way counts as many epochs as it has whole."""
    third, fourth = (Listed(1, number, 2, of.samples) for number, of in ((3, FIRST), (4, SECOND)))
    whole = audit_entries([FIRST, SECOND, third, fourth], 4, 2)
    assert (whole.faults, whole.epochs) == ((), 2)
    half = audit_entries([FIRST, SECOND, third], 4, 2)
    assert (half.faults, half.epochs) == ((), 1)
    more = audit_entries([FIRST, SECOND, replace(third, samples=(3, 1, 0))], 4, 2)
    assert (more.faults, more.epochs) == ((), 1)
    less = audit_entries([FIRST], 4, 2)
    assert (less.faults, less.epochs) == ((), 0)
    often = replace(fourth, samples=(0, 0))
    faults = audit_entries([FIRST, SECOND, third, often], 4, 2).faults
    assert faults == ("epochs 0 to 1: 1 samples more than 2 times, 0 that do not exist",)


def test_a_round_that_lacks_a_sample_is_no_finished_one() -> None:
    """Neither of its epochs counts, whichever of them lacks it; those of later rounds do."""
    for place in (9, 19):
        entries = exact(4, times=2)
        start, stop = entries[place].positions
        entries[place] = replace(entries[place], positions=(start, stop - 1))
        report = audit_entries(entries, 100, 2, SEED)
        assert report.epochs == 2
        assert report.faults[-1] == "epochs 0 to 1: 1 samples less than 2 times"


@pytest.mark.parametrize("place", [9, 19])
def test_positions_beyond_either_epoch_of_a_round_are_found(place: int) -> None:
    """They add up over its epochs."""
    entries = exact(2, times=2)
    entries[place] = replace(entries[place], positions=(90, 102))
    faults = audit_entries(entries, 100, 2, SEED).faults
    assert faults[-1] == "epochs 0 to 1: 0 samples more than 2 times, 2 that do not exist"


def test_samples_of_lists_that_are_missing_are_counted() -> None:
    """Each number that does not exist counts once, however often it comes."""
    entries = [FIRST, Listed(0, 2, 2, (-1, 4, 9, 9)), Listed(1, 3, 1, (0, 1))]
    assert audit_entries(entries, 4).faults == (
        "epoch 0: 0 samples more than once, 3 that do not exist",
        "epoch 0: 2 samples never",
    )


def test_positions_that_come_again_and_again_are_no_more_samples_than_there_are() -> None:
    """A fault names samples, of which there are a hundred."""
    steps = exact(1)
    again = [replace(entry, steps=(n, n)) for n, entry in enumerate([*steps, *steps, *steps], 1)]
    faults = audit_entries(again, 100, seed=SEED).faults
    assert faults[-1] == "epoch 0: 100 samples more than once, 0 that do not exist"


def test_a_fault_in_the_order_of_steps_is_told_once() -> None:
    """All that come after it are of other numbers, too; they are counted all the same."""
    report = audit_entries([*exact(1)[:2], *exact(1)[4:6], *exact(1)[8:]], 100, seed=SEED)
    assert [fault for fault in report.faults if "is of step" in fault] == ["line 3 is of step 5"]
    assert report.steps == 6


NEAR_2_63 = 2**63 - 1


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "change",
    [
        {"epoch": NEAR_2_63},
        {"epoch": 10**15},
        {"steps": (1, NEAR_2_63)},
        {"steps": (NEAR_2_63, NEAR_2_63)},
        {"positions": (0, NEAR_2_63)},
        {"positions": (-NEAR_2_63, 10)},
        {"positions": (NEAR_2_63 - 1, NEAR_2_63)},
    ],
    ids=str,
)
@pytest.mark.parametrize("times", [1, 10**12])
def test_numbers_that_no_run_has_keep_an_audit_no_longer(change: dict[str, Any], times: int) -> None:
    """Whatever a line claims, the verdict is there at once."""
    entries = exact(2)
    entries[3] = replace(entries[3], **change)
    assert audit_entries(entries, 100, times, SEED).faults != ()


@pytest.mark.timeout(30)
def test_lines_of_whole_epochs_that_come_again_keep_an_audit_no_longer() -> None:
    """A short file can claim a large epoch many times: once is enough to see that its samples come twice."""
    step = exact(1)[0]
    again = [replace(step, steps=(n, n), positions=(0, 10**7)) for n in range(1, 1001)]
    faults = audit_entries(again, 10**7, seed=SEED).faults
    assert faults[-1] == "epoch 0: 10000000 samples more than once, 0 that do not exist"


@pytest.mark.timeout(30)
def test_false_fingerprints_keep_an_audit_no_longer() -> None:
    """After a hundred faults the rest is not looked at; three are shown."""
    step = exact(1)[0]
    false = (replace(step, epoch=n, steps=(n + 1, n + 1), positions=(0, 10**5)) for n in range(10**6))
    assert 100 < len(audit_entries(false, 10**5, seed=SEED).faults) < 110


@pytest.mark.timeout(30)
def test_lists_of_a_claimed_training_set_take_no_memory() -> None:
    """They are counted one by one, which a training set of terabytes of numbers does not allow."""
    with pytest.raises(UsageError, match="10,000,000,000 samples are more than an audit counts one by one"):
        audit_entries([FIRST], 10**10)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("claimed", [{"num_samples": 10**18}, {"repeated_augmentation": 10**12}], ids=str)
def test_a_claimed_number_of_samples_is_refused(claimed: dict[str, Any], tmp_path: Path) -> None:
    """Their fingerprint alone would take years; the line says whose claim it is."""
    write(tmp_path, {**START, **claimed})
    with pytest.raises(UsageError, match=r"metrics.jsonl tells of [10,]+ samples, an audit counts 10,000,000,000"):
        audit(tmp_path)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["ledger.jsonl", "metrics.jsonl"])
def test_a_hole_is_no_ledger(name: str, tmp_path: Path) -> None:
    """A file of a terabyte without a line end is one line of error."""
    write(tmp_path, START)
    os.truncate(tmp_path / name, 2**40)
    with pytest.raises(UsageError, match=f"cannot read .*{name}: a line of it is longer"):
        audit(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "7",
        '{"epoch": 0, "world_size": 1}',
        '{"epoch": 0, "world_size": 1, "steps": [1], "positions": [0, 1], "fingerprint": "00"}',
        '{"epoch": 0, "world_size": 1, "steps": [1, 1], "positions": [0, 1], "fingerprint": "xy"}',
        '{"epoch": null, "world_size": 1, "step": 1, "samples": []}',
        '{"epoch": 0, "world_size": 1, "steps": [1, 9223372036854775808], "positions": [0, 1], "fingerprint": "00"}',
        '{"epoch": 0, "world_size": 1, "steps": [1, 1], "positions": [0, 9223372036854775808], "fingerprint": "00"}',
        '{"epoch": 0, "world_size": 1, "step": 9223372036854775808, "samples": []}',
    ],
)
def test_what_is_no_entry_is_refused_by_its_place(line: str) -> None:
    """Whatever of it is missing or of another kind."""
    with pytest.raises(UsageError, match=r"^line 5 is not a step of a ledger$"):
        parse(line, "line 5")


def test_a_line_of_version_0_1_0_is_read_as_it_was() -> None:
    """Numbers in texts are numbers."""
    assert parse('{"epoch": "0", "step": "1", "world_size": "2", "samples": ["3", 1]}', "it") == FIRST
