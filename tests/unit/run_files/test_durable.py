"""Files that are whole or absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_train.run_files import durable


def test_parts_are_written_one_after_the_other() -> None:
    """A new file is written and an old one is replaced."""
    path = Path("a.txt")
    durable.write(path, b"one two")
    assert path.read_bytes() == b"one two"
    durable.write_text(path, "grün")
    assert path.read_text(encoding="utf-8") == "grün"
    assert list(Path().iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails before the rename leaves the old file and nothing beside it."""
    path = Path("a.txt")
    durable.write(path, b"old")

    def fails(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(OSError, match="Input/output error"):
        durable.write(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(Path().iterdir()) == [path]


def test_data_are_on_disk_before_the_name_and_the_name_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Force the file, rename, force the folder: in another order a power cut can leave an empty file."""
    import os

    calls = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        calls.append("folder" if Path(f"/proc/self/fd/{descriptor}").resolve().is_dir() else "file")
        fsync(descriptor)

    def noted_replace(old: Path, new: Path) -> None:
        calls.append("rename")
        replace(old, new)

    monkeypatch.setattr("os.fsync", noted_fsync)
    monkeypatch.setattr("os.replace", noted_replace)
    durable.write(Path("a.txt"), b"data")
    assert calls == ["file", "rename", "folder"]


def test_all_data_are_in_the_file_when_it_is_forced_to_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits in a buffer of Python at that moment does not outlive a power cut, though the name does."""
    import os
    import stat

    forced = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            forced.append(status.st_size)
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", noted)
    with durable.writing(Path("a.txt")) as file:
        file.write(b"one ")
        file.write(b"two")
    assert forced == [7]


def test_only_partial_files_are_cleared_away() -> None:
    """What a killed process was writing is removed, everything else stays."""
    for name in ("a.ckpt", "a.ckpt.partial", "partial"):
        Path(name).write_text("x")
    durable.remove_partial(Path())
    assert sorted(path.name for path in Path().iterdir()) == ["a.ckpt", "partial"]


@pytest.mark.parametrize("name", ["a.txt.partial", "a.txt"])
def test_no_link_is_followed(name: str) -> None:
    """A link in the place of a file, or of one that is not finished, is replaced, and what it leads to stays."""
    Path("outside").write_text("precious")
    Path(name).symlink_to("outside")
    durable.write(Path("a.txt"), b"data")
    assert Path("outside").read_text() == "precious"
    assert Path("a.txt").read_bytes() == b"data"
    assert not Path("a.txt").is_symlink()
