"""What a ledger holds of the steps of an epoch, and what an audit of it finds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_train.errors import UsageError
from hvd_train.progress.fingerprint import fingerprint
from hvd_train.progress.order import order_of
from hvd_train.run_files import ledger
from hvd_train.run_files.ledger import Entry, Listed, audit, audit_entries, extended

FIRST, SECOND = Listed(0, 1, 2, (3, 1)), Listed(0, 2, 2, (0, 2))
THIRD, FOURTH = Listed(1, 3, 1, (0, 1)), Listed(1, 4, 3, (2, 3))
LISTED = [FIRST, SECOND, THIRD, FOURTH]
IMAGENET, BATCH = 1_281_167, 256
SEED = 5


def steps_of(
    epoch: int, num_samples: int = 100, batch: int = 10, *, step: int = 1, world_size: int = 2, times: int = 1
) -> Iterator[Entry]:
    """The steps of an epoch that take what they should, one entry for each; the first one has number `step`."""
    order = order_of(SEED, epoch, num_samples, times)[:]
    for number, start in enumerate(range(0, num_samples, batch), step):
        stop = min(start + batch, num_samples)
        yield Entry(epoch, (number, number), world_size, (start, stop), fingerprint(order[start:stop]))


def joined(steps: list[Entry], num_samples: int = 100) -> list[Entry]:
    """These steps of an epoch, as the ledger has them."""
    entries: list[Entry] = []
    for step in steps:
        entries = extended(entries, step, num_samples)
    return entries


def exact(epochs: int = 3, **settings: Any) -> list[Entry]:
    """The steps of whole epochs of ten steps, each alone."""
    return [step for epoch in range(epochs) for step in steps_of(epoch, step=10 * epoch + 1, **settings)]


def test_a_line_says_which_positions_were_taken_and_what_came(tmp_path: Path) -> None:
    """It is a JSON object that anyone can read, and is read back as it was."""
    entry = Entry(0, (1, 40), 2, (0, 10240), 2**64 - 2)
    expected = {"epoch": 0, "steps": [1, 40], "world_size": 2, "positions": [0, 10240]}
    assert json.loads(entry.line()) == {**expected, "fingerprint": "fffffffffffffffe"}
    (tmp_path / "ledger.jsonl").write_text(entry.line())
    assert list(ledger.read(tmp_path / "ledger.jsonl")) == [entry]


@given(
    num_samples=st.integers(1, 5000),
    batch=st.integers(1, 60),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=6),
)
def test_steps_are_joined_and_none_is_lost(num_samples: int, batch: int, sizes: list[int]) -> None:
    """Entries follow on each other, add up to the steps, stay within one size of the world, and are few."""
    steps = list(steps_of(2, num_samples, batch, step=7))
    of_size = -(-len(steps) // len(sizes))
    steps = [replace(step, world_size=sizes[place // of_size]) for place, step in enumerate(steps)]
    entries = joined(steps, num_samples)
    assert len(entries) <= 100 + len(sizes)
    assert len(entries) == len(steps) or num_samples > 100 * batch
    assert (entries[0].steps[0], entries[-1].steps[1]) == (7, 6 + len(steps))
    assert (entries[0].positions[0], entries[-1].positions[1]) == (0, num_samples)
    for one, other in pairwise(entries):
        assert one.steps[1] + 1 == other.steps[0]
        assert one.positions[1] == other.positions[0]
    for step in steps:
        (holder,) = [entry for entry in entries if entry.steps[0] <= step.steps[0] <= entry.steps[1]]
        assert holder.world_size == step.world_size


def test_an_epoch_of_imagenet_takes_20_kb() -> None:
    """5,005 steps of 256 samples, by the numbers of epoch 90 on 1,024 ranks; and it can be audited."""
    entries = joined(list(steps_of(0, IMAGENET, BATCH, world_size=1024)), IMAGENET)
    report = audit_entries(entries, IMAGENET)
    assert (report.faults, report.epochs, report.steps) == ((), 1, 5005)
    late = [replace(e, epoch=90, steps=(e.steps[0] + 90 * 5005, e.steps[1] + 90 * 5005)) for e in entries]
    assert sum(len(entry.line()) for entry in late) < 20_000


@pytest.mark.parametrize("changes", [{"steps": (3, 3)}, {"positions": (11, 20)}, {"positions": (9, 20)}], ids=str)
def test_steps_that_do_not_follow_on_each_other_are_not_joined(changes: dict[str, Any]) -> None:
    """One line for both would say that the step or the samples between them were taken, too."""
    first, second, *_ = steps_of(0, 10_000, 10)
    assert len(extended([first], second, 10_000)) == 1
    second = replace(second, **changes)
    assert extended([first], second, 10_000) == [first, second]


@pytest.mark.parametrize("at_once", [1, 3, 10, 11])
def test_an_audit_looks_samples_up_a_few_at_a_time(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of an entry memory can hold, the verdict on an epoch under way is the same."""
    monkeypatch.setattr(ledger, "_AT_ONCE", at_once)
    entries = exact(1)[:5]
    assert audit_entries(entries, 100, seed=SEED).faults == ()
    entries[3] = replace(entries[3], fingerprint=wrong_samples(entries[3], 9, 100))
    assert len(audit_entries(entries, 100, seed=SEED).faults) == 1


def test_a_new_epoch_begins_with_its_first_step() -> None:
    """The entries of the epoch before are on disk by then."""
    (last,) = list(steps_of(0, 10, 10))
    (first,) = list(steps_of(1, 10, 10, step=2))
    assert extended([last], first, 10) == [first]


@pytest.mark.parametrize("entries", [exact(2), LISTED], ids=["entries", "version 0.1.0"])
def test_an_exact_run(entries: list[Entry | Listed]) -> None:
    """Every sample comes once in every epoch, whatever the world size."""
    num_samples = 4 if entries is LISTED else 100
    report = audit_entries(entries, num_samples, seed=SEED)
    assert report.faults == ()
    sizes = "1, 2, 3" if entries is LISTED else "2"
    assert str(report) == (
        f"exact: every one of {num_samples} samples counted once in each of 2 finished epochs "
        f"({len(entries)} steps, world sizes {sizes})"
    )
    under_way = audit_entries(entries[:-1], num_samples, seed=SEED)
    assert (under_way.faults, under_way.epochs) == ((), 1)


@pytest.mark.parametrize(
    ("entries", "fault"),
    [
        ([FIRST, Listed(0, 2, 2, (0, 1)), THIRD], "epoch 0: 1 samples more than once"),
        ([FIRST, Listed(0, 2, 2, (0,)), THIRD], "epoch 0: 1 samples never"),
        ([FIRST, Listed(0, 2, 2, (0, 9)), THIRD], "1 that do not exist"),
        ([FIRST, Listed(0, 2, 2, (0, 4)), THIRD], "1 that do not exist"),
        ([FIRST, THIRD], "line 2 is of step 3"),
        ([FIRST, FIRST], "line 2 is of step 1"),
        ([FIRST, SECOND, Listed(2, 3, 1, (0, 1))], "epoch 1: 4 samples never"),
        ([THIRD, FIRST], "line 2 is of epoch 0, after a later one"),
    ],
)
def test_what_is_wrong_in_lists_is_named(entries: list[Listed], fault: str) -> None:
    """A fault names samples that were lost, came twice or do not exist, and steps that are missing or come twice."""
    report = audit_entries(entries, 4)
    assert any(fault in line for line in report.faults), report
    assert str(report).startswith("NOT exact: ")


def changed(place: int, **changes: Any) -> list[Entry]:
    """The steps of exact epochs but for one, which is `place` steps after the first."""
    entries = exact()
    return [*entries[:place], replace(entries[place], **changes), *entries[place + 1 :]]


def wrong_samples(entry: Entry, old: int, new: int) -> int:
    """The fingerprint of what an entry took, with one sample in place of another."""
    samples = order_of(SEED, entry.epoch, 100, 1)[slice(*entry.positions)]
    return fingerprint(np.where(samples == samples[old], new, samples))


@pytest.mark.parametrize("place", [0, 13, 29])
def test_samples_that_are_not_those_of_the_order_are_found(place: int) -> None:
    """A single one that came in place of another: in a finished epoch, and in one that is under way."""
    entry = exact()[place]
    for entries in (exact(), exact()[: place + 1]):
        entries[place] = replace(entry, fingerprint=wrong_samples(entry, 3, 100))
        (fault,) = audit_entries(entries, 100, seed=SEED).faults
        first, stop = entry.positions
        assert fault == (
            f"step {place + 1}: not the samples that stand at positions {first} to {stop - 1} of epoch {entry.epoch}"
        )


def test_steps_that_were_joined_are_named_together() -> None:
    """By the first and the last of them: the ledger does not know which one it was."""
    entries = joined(list(steps_of(0, 1000, 5)), 1000)
    wrong = [entries[0], replace(entries[1], fingerprint=1), *entries[2:]]
    assert audit_entries(wrong, 1000, seed=SEED).faults == (
        "steps 3 to 4: not the samples that stand at positions 10 to 19 of epoch 0",
    )


def test_a_sample_that_comes_twice_in_an_epoch_is_found() -> None:
    """Although the step with it has as many samples as it should have, and all of them exist."""
    entry, other = exact()[2:4]
    (twice,) = order_of(SEED, 0, 100, 1)[other.positions[0] : other.positions[0] + 1]
    faults = audit_entries(changed(2, fingerprint=wrong_samples(entry, 0, int(twice))), 100, seed=SEED).faults
    assert faults == ("step 3: not the samples that stand at positions 20 to 29 of epoch 0",)


@pytest.mark.parametrize(
    ("entries", "fault"),
    [
        ([*exact()[:4], *exact()[5:]], "line 5 is of step 6"),
        ([*exact()[:4], *exact()[3:]], "line 5 is of step 4"),
        (exact()[1:], "line 1 is of step 2"),
        (changed(4, positions=(40, 49)), "epoch 0: 1 samples never"),
        (changed(4, positions=(39, 50)), "epoch 0: 1 samples more than once"),
        (changed(19, positions=(90, 102)), "epoch 1: 0 samples more than once, 2 that do not exist"),
        (changed(9, positions=(90, 98)), "epoch 0: 2 samples never"),
        ([step for step in exact() if step.epoch != 1], "epoch 1: 100 samples never"),
        (changed(12, steps=(13, 14)), "line 14 is of step 14"),
        (changed(22, epoch=0), "line 23 is of epoch 0, after a later one"),
    ],
)
def test_what_is_wrong_in_positions_is_named(entries: list[Entry], fault: str) -> None:
    """Positions of an epoch that no step took, or two, and steps that are missing or come twice."""
    report = audit_entries(entries, 100, seed=SEED)
    assert any(fault in line for line in report.faults), report


def test_an_epoch_that_version_0_1_0_began() -> None:
    """Its steps list their samples; those of today have the positions after them."""
    steps = exact(2)
    order = order_of(SEED, 0, 100, 1)
    listed = [Listed(0, s.steps[0], 2, tuple(order[slice(*s.positions)].tolist())) for s in steps[:4]]
    report = audit_entries([*listed, *joined(steps[4:10]), *steps[10:]], 100, seed=SEED)
    assert (report.faults, report.epochs, report.steps) == ((), 2, 20)
    wrong = [replace(listed[0], samples=(0, *listed[0].samples[1:])), *listed[1:], *steps[4:]]
    assert any("1 samples more than once" in fault for fault in audit_entries(wrong, 100, seed=SEED).faults)
    wrong = [*listed, replace(steps[4], fingerprint=1), *steps[5:]]
    assert any("step 5: not the samples" in fault for fault in audit_entries(wrong, 100, seed=SEED).faults)


def test_repeated_augmentation_is_judged_by_rounds() -> None:
    """Two epochs have each sample twice; half a round is under way."""
    entries = exact(4, times=2)
    report = audit_entries(entries, 100, 2, SEED)
    assert (report.faults, report.epochs) == ((), 4)
    report = audit_entries(entries[:30], 100, 2, SEED)
    assert (report.faults, report.epochs) == ((), 3)
    later = [replace(entry, steps=(entry.steps[0] - 1, entry.steps[1] - 1)) for entry in entries[16:]]
    faults = audit_entries([*entries[:15], *later], 100, 2, SEED).faults
    assert faults == ("epochs 0 to 1: 10 samples less than 2 times",)


def test_without_a_ledger_the_user_is_told_how_to_have_one(tmp_path: Path) -> None:
    """The error says what is missing; there is neither a traceback nor a verdict."""
    with pytest.raises(UsageError, match="train with --ledger"):
        audit(tmp_path)
    entry = exact()[0]
    (tmp_path / "ledger.jsonl").write_text("what\n" + entry.line())
    with pytest.raises(UsageError, match="does not say how many samples"):
        audit(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"name": "start", "num_samples": 100}\n')
    with pytest.raises(UsageError, match="line 1 is not a step"):
        audit(tmp_path)
    (tmp_path / "ledger.jsonl").write_text(entry.line() + entry.line()[:20])
    with pytest.raises(UsageError, match="does not say the seed"):
        audit(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(f'{{"name": "start", "num_samples": 100, "seed": {SEED}}}\n{{"name": "start", "nu')
    assert audit(tmp_path).steps == 1


@pytest.mark.parametrize(
    ("positions", "place", "fault"),
    [
        ((39, 50), 4, "epoch 0: 1 samples more than once, 0 that do not exist"),
        ((90, 98), 9, "epoch 0: 2 samples never"),
    ],
)
def test_positions_that_do_not_add_up_are_not_saved_by_fingerprints_that_do(
    positions: tuple[int, int], place: int, fault: str
) -> None:
    """The step is named whose samples are not those at its positions, and then what became of the epoch."""
    faults = audit_entries(changed(place, positions=positions), 100, seed=SEED).faults
    step = f"step {place + 1}: not the samples that stand at positions {positions[0]} to {positions[1] - 1} of epoch 0"
    assert faults == (step, fault)


def test_a_long_entry_is_looked_up_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch of a thousand million samples in one line needs little memory, and its samples count all the same."""
    monkeypatch.setattr(ledger, "_AT_ONCE", 7)
    entries = exact(1)
    entries[3] = replace(entries[3], fingerprint=1)
    faults = audit_entries(entries, 100, seed=SEED).faults
    assert faults == ("step 4: not the samples that stand at positions 30 to 39 of epoch 0",)


@pytest.mark.parametrize(
    "line", ["[" * 100_000, "7", '{"epoch": 1e999}', '{"epoch": 0, "world_size": 1, "samples": 3}']
)
def test_a_ledger_of_any_content_is_refused_in_one_line(line: str) -> None:
    """Nesting without end, wrong types and numbers that are none name the line of the file."""
    with pytest.raises(UsageError, match="line 3 is not a step of a ledger"):
        ledger.parse(line, "line 3")


def test_a_start_of_any_content_is_refused_in_one_line(tmp_path: Path) -> None:
    """Lines that cannot be read are passed over, and a number of samples that is none is named."""
    (tmp_path / "ledger.jsonl").write_text("")
    for number in ('"many"', "[]", "0", "-1", "1" * 400):
        start = f'{{"name": "start", "num_samples": {number}, "seed": 0}}'
        (tmp_path / "metrics.jsonl").write_text('"start"' + "[" * 100_000 + f"\n{start}\n")
        with pytest.raises(UsageError, match="the ledger cannot be judged"):
            audit(tmp_path)
