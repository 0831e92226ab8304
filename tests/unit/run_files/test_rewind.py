"""Files of records that go back to the step from which a run goes on; test_journal.py has the rest."""

from __future__ import annotations

from pathlib import Path

from hvd_train.run_files.rewind import Mark, forget_after


def test_lines_that_cannot_be_read_go_and_others_stay() -> None:
    """What comes after the step goes, and what is none of ours; the last step and epoch are those of what is left."""
    path = Path("records")
    path.write_text("head\nstep 1\nepoch 1\nstep 2\n???\nstep 3\n")

    def read(line: bytes) -> Mark | None:
        kind, _, number = line.decode().strip().partition(" ")
        return Mark("head", 0, 0) if kind == "head" else Mark(kind, int(number), int(number)) if number else None

    assert forget_after(path, 2, 1, read) == (2, 1)
    assert path.read_text() == "head\nstep 1\nepoch 1\nstep 2\n"
