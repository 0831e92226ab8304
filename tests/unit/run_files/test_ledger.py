"""The ledger of a run, whichever way its processes ended, and its audit."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_train.errors import UsageError
from hvd_train.progress.order import ORDERS, UNDECIDED, EpochOrder, fingerprint
from hvd_train.progress.sampling import drawn_by
from hvd_train.run_files.ledger import (
    Audit,
    Entry,
    LedgerFile,
    StepAnswer,
    audit,
    audit_entries,
    extended,
    in_digits,
    parse,
    read,
    states_in,
)
from hvd_train.run_files.run_folder import RunFolder
from tests.support.runs import totals

SEED = 5
HERE = Path()
LEDGER = HERE / "ledger.jsonl"
METRICS = HERE / "metrics.jsonl"
START = {"kind": "event", "time": 0, "name": "start", "num_samples": 100, "seed": SEED}


def steps_of(
    epoch: int, num_samples: int = 100, batch: int = 10, *, step: int = 1
) -> Iterator[Entry]:
    """Yield one entry for each step of an epoch; the first has number `step`."""
    order = EpochOrder(SEED, epoch, num_samples)[:]
    for number, start in enumerate(range(0, num_samples, batch), step):
        stop = min(start + batch, num_samples)
        samples = fingerprint(order[start:stop])
        yield Entry(epoch, (number, number), 2, (start, stop), samples, f"{number:024x}")


def exact(epochs: int = 3) -> list[Entry]:
    return [step for epoch in range(epochs) for step in steps_of(epoch, step=10 * epoch + 1)]


def write(*metrics: object) -> None:
    text = [line if isinstance(line, str) else json.dumps(line) for line in metrics]
    METRICS.write_text("\n".join([*text, ""]))
    LEDGER.write_text("".join(entry.line() for entry in exact(2)))


def test_a_line_names_the_positions_and_the_fingerprint_and_is_read_back() -> None:
    entry = Entry(0, (1, 40), 2, (0, 10240), 2**64 - 2).with_state(40, 0, "0a")
    assert entry.line() == (
        '{"epoch": 0, "steps": [1, 40], "world_size": 2, "positions": [0, 10240], '
        '"fingerprint": "fffffffffffffffe", "answers": "", "states": {"40/0": "0a"}}\n'
    )
    LEDGER.write_text(entry.line())
    assert list(read(LEDGER)) == [entry]
    assert states_in(HERE) == {(40, 0): "0a"}


def digits(loss: float = 0.5, norm: float = 2.0, *, top1: float = 3.0, before: str = "") -> str:
    return in_digits(loss, norm, totals(loss=loss, top1=top1), before)


def read_back(text: str) -> StepAnswer:
    (found,) = Entry(0, (7, 7), 2, (0, 20), 1, text).answers_by_step().values()
    return found


def test_the_answer_of_a_step_depends_on_each_bit_and_on_the_steps_before() -> None:
    one = read_back(digits())
    assert one == StepAnswer(0.5, 2.0, one.digest)
    two_steps = Entry(0, (7, 8), 2, (0, 40), 1, digits() + digits(top1=4.0))
    assert two_steps.answers_by_step() == {7: one, 8: read_back(digits(top1=4.0))}
    for other in (
        digits(loss=0.5 + 2**-52),
        digits(top1=4.0),
        digits(before=digits()),
        digits(before=digits(loss=0.6)),
    ):
        assert not read_back(other).is_same(one)
        assert read_back(other).gaps(one) == (0.0, 0.0)
    for norm, is_same in ((2.00002, True), (2.0001, False), (math.nan, False)):
        assert read_back(digits(norm=norm)).is_same(one) == is_same


def test_an_answer_holds_what_is_not_finite() -> None:
    assert digits(math.nan, math.nan) == digits(-math.nan, -math.nan)
    for value, kept in ((math.nan, "nan"), (1e300, "inf")):
        found = read_back(digits(value, value))
        assert str(found.gradient_norm) == kept
        assert found.is_same(found)


@settings(max_examples=25)
@given(
    num_samples=st.integers(1, 5000),
    batch=st.integers(1, 60),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=6),
)
def test_steps_are_joined_and_none_is_lost(num_samples: int, batch: int, sizes: list[int]) -> None:
    steps = list(steps_of(0, num_samples, batch))
    of_size = -(-len(steps) // len(sizes))
    steps = [replace(step, world_size=sizes[place // of_size]) for place, step in enumerate(steps)]
    entries = []
    for step in steps:
        entries = extended(entries, step, num_samples)
    assert len(entries) <= 100 + len(sizes)
    assert len(entries) == len(steps) or num_samples > 100 * batch
    report = audit_entries(entries, num_samples, SEED)
    assert (report.faults, report.steps) == ((), len(steps))
    world_sizes = [
        entry.world_size for entry in entries for _ in range(entry.steps[0], entry.steps[1] + 1)
    ]
    assert world_sizes == [step.world_size for step in steps]
    assert "".join(entry.answers for entry in entries) == "".join(step.answers for step in steps)


def moved(entry: Entry, begin: int, end: int) -> list[Entry]:
    return [replace(entry, positions=(entry.positions[0] + begin, entry.positions[1] + end))]


CHANGES = {
    "a step is missing": lambda entry: [],
    "a step is there twice": lambda entry: [entry, entry],
    "another epoch": lambda entry: [replace(entry, epoch=entry.epoch + 1)],
    "another number": lambda entry: [
        replace(entry, steps=(entry.steps[0] + 1, entry.steps[1] + 1))
    ],
    "a sample before": lambda entry: moved(entry, -1, 0),
    "a sample less": lambda entry: moved(entry, 0, -1),
    "a sample more": lambda entry: moved(entry, 0, 1),
    "no sample": lambda entry: moved(entry, 0, -10),
    "other samples": lambda entry: [replace(entry, fingerprint=entry.fingerprint ^ 1)],
}


@pytest.mark.parametrize("change", CHANGES)
@settings(max_examples=10)
@given(place=st.integers(0, 28))
def test_what_is_wrong_is_named(change: str, place: int) -> None:
    """By its line, or the line after."""
    entries = exact()
    entries[place : place + 1] = CHANGES[change](entries[place])
    report = audit_entries(entries, 100, SEED)
    assert report.faults[0].startswith((f"line {place + 1}: ", f"line {place + 2}: ")), report
    assert str(report).startswith("NOT exact: ")


def test_an_order_without_all_samples_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = np.array([3, *range(1, 100)])
    entries = [
        replace(entry, fingerprint=fingerprint(wrong[slice(*entry.positions)])) for entry in exact()
    ]
    monkeypatch.setitem(ORDERS, "shuffled", lambda *_: wrong)
    (fault, *_) = audit_entries(entries, 100, SEED).faults
    assert fault == "line 10: epoch 0 does not have all samples"


def test_draws_are_compared_with_the_weights() -> None:
    weights = np.arange(100.0)
    entries = exact(2)
    assert audit_entries(entries, 100, SEED, weights=weights).faults
    for place, entry in enumerate(entries):
        samples = drawn_by(weights)(SEED, entry.epoch, 100, UNDECIDED)[slice(*entry.positions)]
        entries[place] = replace(entry, fingerprint=fingerprint(samples))
    report = audit_entries(entries, 100, SEED, weights=weights)
    assert str(report).startswith(
        "exact: all 100 draws by weight counted as drawn, once in each of 2"
    )
    (fault, *_) = audit_entries(entries, 100, SEED, weights=weights[::-1]).faults
    assert fault.endswith("not the samples that stand there")


def test_a_run_from_a_file_may_begin_within_an_epoch() -> None:
    for begin, epochs in ((0, 3), (4, 2), (10, 2)):
        report = audit_entries(exact()[begin:], 100, SEED, from_step=begin)
        assert (report.faults, report.epochs) == ((), epochs)
    assert audit_entries(exact()[5:], 100, SEED, from_step=4).faults


def test_the_last_start_of_the_run_counts() -> None:
    """A run that was started again in its folder may have another training set."""
    note = {**START, "name": "note", "num_samples": 7}
    noise = (
        '"start" torn',
        '["start", "num_samples"]',
        {"kind": "event", "time": 0, "name": "start"},
        note,
    )
    write(*noise, {**START, "num_samples": 90, "seed": 1}, START, *noise)
    assert (audit(HERE).faults, audit(HERE).num_samples) == ((), 100)


def test_an_audit_needs_a_start_and_whole_lines() -> None:
    entry = exact()[0]
    LEDGER.write_text("what\n" + entry.line())
    with pytest.raises(UsageError, match="is not a run of hvd_train"):
        audit(HERE)
    METRICS.write_text(json.dumps(START) + '\n{"name": "start", "nu')
    with pytest.raises(UsageError, match="line 1 is not a step"):
        audit(HERE)
    LEDGER.write_text(entry.line() + entry.line()[:20])
    assert audit(HERE).steps == 1


@pytest.mark.parametrize("line", ["[" * 100_000, "7", "{}"])
def test_what_is_no_entry_is_refused_by_its_place(line: str) -> None:
    with pytest.raises(UsageError, match=r"^line 3 is not a step of a ledger$"):
        parse(line, "line 3")


@pytest.mark.parametrize(
    "wrong",
    [
        '"epoch": 1e999',
        '"fingerprint": "xy"',
        '"steps": [2, 1]',
        '"answers": 7',
        '"answers": "0"',
        '"answers": "gggggggggggggggggggggggg"',
        '"answers": "00 00 00 00 00 00 00 00 00 00 00 00"',
        '"answers": "000000000000000000000000000000000000000000000000"',
        '"states": {"1": "0a"}',
        '"states": 7',
    ],
)
def test_an_entry_with_a_wrong_value_is_refused(wrong: str) -> None:
    line = Entry(0, (1, 1), 1, (0, 1), 0).line().replace("}", f", {wrong}}}")
    with pytest.raises(UsageError, match="not a step of a ledger"):
        parse(line, "line 3")


def test_a_run_without_a_number_of_samples_cannot_be_audited() -> None:
    write('"start"' + "[" * 100_000, {**START, "num_samples": "many"})
    with pytest.raises(UsageError, match="cannot judge"):
        audit(HERE)
    write(START)
    os.truncate(LEDGER, 2**40)
    with pytest.raises(UsageError, match=r"cannot read .*ledger\.jsonl: it is larger than"):
        audit(HERE)


STEPS = [*steps_of(0, 1000, 2), *steps_of(1, 1000, 2, step=501)]
"""Two epochs of 500 steps, of which five are joined at a time."""


def assert_two_exact_epochs() -> Audit:
    report = audit_entries(read(LEDGER), 1000, SEED)
    assert (report.faults, report.epochs, report.steps) == ((), 2, 1000)
    return report


class Run:
    """A training that may end anywhere: its file may lack entries of its state."""

    def __init__(self, recent: list[Entry], step: int) -> None:
        self.recent = recent
        self.step = step
        self.file = LedgerFile(RunFolder(HERE), step // 500)
        for entry in recent:
            self.file.took(entry)

    def trains_to(self, step: int, world_size: int = 2) -> Run:
        """Take the steps up to `step`; at the end of an epoch the ledger is forced to disk."""
        for entry in STEPS[self.step : step]:
            self.recent = extended(self.recent, replace(entry, world_size=world_size), 1000)
            self.file.took(self.recent[-1])
            self.file.sync(self.step // 500)  # writes nothing that later steps join
            if entry.positions[1] == 1000:
                self.file.sync(entry.epoch + 1)
        self.step = step
        return self


@pytest.mark.parametrize(
    ("done", "lines", "torn"), [(613, 1, 30), (615, 20, 30), (1000, 0, 0), (1000, 1, 30)]
)
def test_the_next_rank_0_fills_the_ledger(done: int, lines: int, torn: int) -> None:
    """What the file lacks comes from the state, and nothing comes twice."""
    run = Run([], 0).trains_to(done)
    whole = LEDGER.read_bytes().splitlines(keepends=True)
    left = whole[: len(whole) - lines]
    LEDGER.write_bytes(b"".join(left) + (whole[-1][:torn] if torn else b""))
    Run(run.recent, done).trains_to(1000, world_size=1).file.sync(2)
    assert_two_exact_epochs()


@pytest.mark.parametrize("back", [0, 11, 612])
def test_steps_beyond_the_state_did_not_happen(back: int) -> None:
    earlier = Run([], 0).trains_to(612 - back)
    recent = earlier.recent
    earlier.trains_to(612).file.complete()
    Run(recent, 612 - back).trains_to(1000, world_size=3).file.sync(2)
    report = assert_two_exact_epochs()
    assert report.world_sizes == ((2, 3) if back < 612 else (3,))


def test_something_else_is_not_overwritten() -> None:
    LEDGER.write_text("what\nelse\n")
    with pytest.raises(UsageError, match=r"ledger\.jsonl: line 1 is not a step of a ledger"):
        LedgerFile(RunFolder(HERE), 0)
    assert LEDGER.read_text() == "what\nelse\n"
