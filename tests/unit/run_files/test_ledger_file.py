"""What ledger.jsonl holds however a process ended, and what it costs to open it again."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from hvd_train.errors import UsageError
from hvd_train.run_files import ledger_file, tail
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


def test_an_entry_is_written_when_another_begins_or_the_epoch_ends(tmp_path: Path) -> None:
    """Five steps a line here; what is not written yet is in the state."""
    run = Run(tmp_path, [], 0).trains_to(13)
    assert held(tmp_path) == [(1, 5), (6, 10)]
    run.trains_to(500)
    assert held(tmp_path) == [(first, first + 4) for first in range(1, 500, 5)]


def test_a_run_that_is_stopped_has_all_its_steps_on_disk(tmp_path: Path) -> None:
    """`complete` writes the entry under way; when steps join it later, they take its place in the file."""
    run = Run(tmp_path, [], 0).trains_to(13)
    run.file.complete()
    run.file.close()
    assert held(tmp_path) == [(1, 5), (6, 10), (11, 13)]
    Run(tmp_path, run.recent, 13).trains_to(16)
    assert held(tmp_path) == [(1, 5), (6, 10), (11, 15)]


@pytest.mark.parametrize("first_of_a_line", [11, 12])
def test_steps_that_join_a_line_which_is_on_disk_take_its_place(first_of_a_line: int, tmp_path: Path) -> None:
    """Also where it was of one step alone: none is there twice."""
    run = Run(tmp_path, [], 0).trains_to(first_of_a_line)
    run.file.close()
    Run(tmp_path, run.recent, first_of_a_line).trains_to(16).file.close()
    assert held(tmp_path) == [(1, 5), (6, 10), (11, 15), (16, 16)]


@pytest.mark.parametrize("same_process", [True, False])
def test_lines_that_are_on_disk_are_not_written_again(
    same_process: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When ranks meet again the state has them still; to cut them off first would be to lose them for a moment."""
    run = Run(tmp_path, [], 0).trains_to(500)
    before = (tmp_path / "ledger.jsonl").read_bytes()
    if not same_process:
        run.file.close()
        run.file = LedgerFile(tmp_path, 500)
    written: list[bytes] = []
    monkeypatch.setattr(os, "write", lambda file, data: written.append(data) or len(data))
    for entry in run.recent:
        run.file.took(entry)
    run.file.close()
    assert written == []
    assert (tmp_path / "ledger.jsonl").read_bytes() == before


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


@pytest.mark.parametrize("written", [0, 5, 11])
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


def test_a_whole_epoch_outlives_a_power_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its end all its lines are forced to disk: from the next step on the state does not have them any more."""

    def noted(file: int) -> None:
        if stat.S_ISREG(os.fstat(file).st_mode):  # the folder is forced to disk when the file is made
            on_disk.append((tmp_path / "ledger.jsonl").read_bytes())

    run, on_disk = Run(tmp_path, [], 0), list[bytes]()
    monkeypatch.setattr(os, "fsync", noted)
    run.trains_to(500)
    assert on_disk == [(tmp_path / "ledger.jsonl").read_bytes()]
    assert held(tmp_path)[-1] == (496, 500)


@pytest.mark.parametrize("torn", [0, 30])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("lines", [0, 1, 20])
@pytest.mark.parametrize("done", [613, 615, 1000])
def test_what_a_lost_rank_did_not_write_is_written_by_its_successor(
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


@pytest.mark.parametrize("back", [0, 1, 2, 11, 60, 111])
def test_steps_beyond_the_state_did_not_happen(back: int, tmp_path: Path) -> None:
    """A run that goes on from an earlier commit takes them again, on another number of ranks."""
    earlier = Run(tmp_path, [], 0).trains_to(612 - back)
    recent = earlier.recent
    earlier.trains_to(612).file.complete()
    Run(tmp_path, recent, 612 - back).trains_to(1000, world_size=3).file.sync()
    report = audit_entries(read(tmp_path / "ledger.jsonl"), 1000, seed=SEED)
    assert (report.faults, report.epochs, report.steps, report.world_sizes) == ((), 2, 1000, (2, 3))


def test_a_line_of_version_0_1_0_stays(tmp_path: Path) -> None:
    """Its ledgers have a line for each step, and go on with those of today."""
    path = tmp_path / "ledger.jsonl"
    path.write_text("".join(f'{{"epoch": 0, "step": {n}, "world_size": 1, "samples": [{n}]}}\n' for n in (1, 2, 3)))
    Run(tmp_path, [], 2).trains_to(3).file.complete()
    assert held(tmp_path) == [(1, 1), (2, 2), (3, 3)]


def test_opening_reads_the_end_of_the_file_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After 90 epochs as after one: 64 KB, to go on after the last step or some steps before it."""
    lines = "".join(Entry(0, (n, n), 8, (0, 10_000), n).line() for n in range(1, 9001))
    (tmp_path / "ledger.jsonl").write_text(lines)
    read_bytes = 0

    def counted(file: Any) -> Any:
        class Counting:
            def seek(self, *place: int) -> int:
                offset: int = file.seek(*place)
                return offset

            def read(self, size: int) -> bytes:
                nonlocal read_bytes
                read_bytes += size
                data: bytes = file.read(size)
                return data

        return tail.lines_backwards(Counting())  # type: ignore[arg-type]

    monkeypatch.setattr(ledger_file, "lines_backwards", counted)
    for step in (9000, 8990):
        read_bytes = 0
        LedgerFile(tmp_path, step).close()
        assert held(tmp_path)[-1] == (step, step)
        assert 0 < read_bytes <= 1 << 16


def test_something_else_is_not_overwritten(tmp_path: Path) -> None:
    """A file of that name which is no ledger stays as it is."""
    (tmp_path / "ledger.jsonl").write_text("what\nelse\n")
    with pytest.raises(UsageError, match="the line at byte 5 is not a step of a ledger"):
        LedgerFile(tmp_path, 0)
    assert (tmp_path / "ledger.jsonl").read_text() == "what\nelse\n"


def test_a_first_step_is_written_where_all_before_was_cut_away(tmp_path: Path) -> None:
    """A run that goes back to its beginning has its first step on disk again, though that is a line of its own."""
    file = LedgerFile(tmp_path, 0)
    file.took(STEPS[0])
    file.close()
    assert held(tmp_path) == [(1, 1)]
    again = LedgerFile(tmp_path, 0)
    assert held(tmp_path) == []
    again.took(STEPS[0])
    again.close()
    assert held(tmp_path) == [(1, 1)]


def test_a_planted_link_is_not_cut(tmp_path: Path) -> None:
    """The ledger of another run, to which it leads, stays as it is."""
    run = Run(tmp_path, [], 0).trains_to(500)
    run.file.close()
    before = (tmp_path / "ledger.jsonl").rename(tmp_path / "outside").read_bytes()
    (tmp_path / "ledger.jsonl").symlink_to("outside")
    with pytest.raises(OSError, match="it is a link, which is not followed"):
        LedgerFile(tmp_path, 10)
    assert (tmp_path / "outside").read_bytes() == before
