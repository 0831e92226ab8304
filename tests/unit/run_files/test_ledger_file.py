"""What ledger.jsonl holds however a process ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_train.errors import UsageError
from hvd_train.run_files.ledger import Entry, audit_entries, extended, read
from hvd_train.run_files.ledger_file import LedgerFile
from tests.support.full_disk import no_room
from tests.unit.run_files.test_ledger import SEED, steps_of

STEPS = [*steps_of(0, 1000, 2), *steps_of(1, 1000, 2, step=501)]
"""Two epochs of 500 steps, of which five are joined at a time."""


class Run:
    """A training that may end anywhere: its state has the entries of the epoch, its file may lack some of them."""

    def __init__(self, folder: Path, recent: list[Entry], step: int) -> None:
        self.recent, self.step = recent, step
        self.file = LedgerFile(folder, step)
        for entry in recent:
            self.file.took(entry)

    def trains_to(self, step: int, world_size: int = 2) -> Run:
        """Take the steps up to `step`; at the end of an epoch the ledger is forced to disk."""
        for entry in STEPS[self.step : step]:
            self.recent = extended(self.recent, Entry(**{**vars(entry), "world_size": world_size}), 1000)
            self.file.took(self.recent[-1])
            if entry.positions[1] == 1000:
                self.file.sync()
        self.step = step
        return self


def held(folder: Path) -> list[tuple[int, int]]:
    """The steps of each line."""
    return [entry.steps for entry in read(folder / "ledger.jsonl")]


def test_an_entry_is_written_when_another_begins_the_epoch_ends_or_the_run_stops(tmp_path: Path) -> None:
    """When steps join an entry after a stop, it takes the place of the old one in the file."""
    run = Run(tmp_path, [], 0).trains_to(13)
    assert held(tmp_path) == [(1, 5), (6, 10)]
    run.file.close()
    assert held(tmp_path) == [(1, 5), (6, 10), (11, 13)]
    run = Run(tmp_path, run.recent, 13).trains_to(16)
    assert held(tmp_path) == [(1, 5), (6, 10), (11, 15)]
    run.trains_to(500)
    assert held(tmp_path) == [(first, first + 4) for first in range(1, 500, 5)]


def test_nothing_is_cut_off_by_a_process_that_has_lost_the_folder(tmp_path: Path) -> None:
    """A line that steps have joined stays as its successor wrote it."""
    held_by_us = True
    run = Run(tmp_path, [], 0).trains_to(13)
    run.file.close()
    run.file = LedgerFile(tmp_path, 13, permission=lambda: held_by_us)
    run.trains_to(14)
    held_by_us = False
    run.file.close()
    assert held(tmp_path) == [(1, 5), (6, 10), (11, 13)]


@pytest.mark.parametrize("written", [0, 11])
def test_steps_join_an_entry_that_waits_for_room_on_a_full_disk(written: int, tmp_path: Path) -> None:
    """It is in the file once, in its last form, after the entries that waited before it."""
    run = Run(tmp_path, [], 0).trains_to(written)
    if written:
        run.file.complete()
    with no_room():
        run.trains_to(13).file.complete()
        run.trains_to(14).file.complete()
    run.trains_to(16).file.complete()
    run.file.close()
    assert held(tmp_path) == [(1, 5), (6, 10), (11, 15), (16, 16)]
    assert audit_entries(read(tmp_path / "ledger.jsonl"), 1000, seed=SEED).faults == ()


@pytest.mark.parametrize(
    ("done", "lines", "world_size", "torn"),
    [(613, 0, 1, 0), (613, 20, 2, 30), (615, 1, 1, 30), (615, 20, 2, 0), (1000, 1, 2, 0), (1000, 20, 1, 30)],
)
def test_the_next_rank_0_writes_what_a_lost_one_did_not(
    done: int, lines: int, world_size: int, torn: int, tmp_path: Path
) -> None:
    """Whatever the file lacks of the epoch, torn last line included, comes from the state; nothing comes twice."""
    run = Run(tmp_path, [], 0).trains_to(done)
    whole = (tmp_path / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    left = whole[: len(whole) - lines]
    (tmp_path / "ledger.jsonl").write_bytes(b"".join(left) + (whole[-1][:torn] if torn else b""))
    Run(tmp_path, run.recent, done).trains_to(1000, world_size).file.sync()
    report = audit_entries(read(tmp_path / "ledger.jsonl"), 1000, seed=SEED)
    assert (report.faults, report.epochs, report.steps) == ((), 2, 1000)


@pytest.mark.parametrize("back", [0, 1, 11, 111, 612])
def test_steps_beyond_the_state_did_not_happen(back: int, tmp_path: Path) -> None:
    """A run that resumes from an earlier commit takes them again, on another number of ranks."""
    earlier = Run(tmp_path, [], 0).trains_to(612 - back)
    recent = earlier.recent
    earlier.trains_to(612).file.complete()
    Run(tmp_path, recent, 612 - back).trains_to(1000, world_size=3).file.sync()
    report = audit_entries(read(tmp_path / "ledger.jsonl"), 1000, seed=SEED)
    assert (report.faults, report.epochs, report.steps) == ((), 2, 1000)
    assert report.world_sizes == ((2, 3) if back < 612 else (3,))


def test_lines_of_version_0_1_0_stay(tmp_path: Path) -> None:
    """Its ledgers have a line for each step, and continue with those of today."""
    path = tmp_path / "ledger.jsonl"
    path.write_text("".join(f'{{"epoch": 0, "step": {n}, "world_size": 1, "samples": [{n}]}}\n' for n in (1, 2, 3)))
    Run(tmp_path, [], 2).trains_to(3).file.complete()
    assert held(tmp_path) == [(1, 1), (2, 2), (3, 3)]


def test_something_else_is_not_overwritten(tmp_path: Path) -> None:
    """A file of that name which is no ledger stays as it is, and so does a ledger that a planted link leads to."""
    path = tmp_path / "ledger.jsonl"
    path.write_text("what\nelse\n")
    with pytest.raises(UsageError, match="the line at byte 5 is not a step of a ledger"):
        LedgerFile(tmp_path, 0)
    assert path.read_text() == "what\nelse\n"
    path.unlink()
    Run(tmp_path, [], 0).trains_to(500).file.close()
    before = path.rename(tmp_path / "outside").read_bytes()
    path.symlink_to("outside")
    with pytest.raises(OSError, match="it is a link, which is not followed"):
        LedgerFile(tmp_path, 10)
    assert (tmp_path / "outside").read_bytes() == before
