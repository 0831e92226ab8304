"""What the control groups around a process leave to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_train.world import control_groups


def test_the_least_memory_that_a_group_leaves_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of files on disks are given back before memory is short, those of /dev/shm are not; "max" is no limit."""
    monkeypatch.setattr(control_groups, "_OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(control_groups, "_GROUPS", tmp_path)
    assert control_groups.memory_left() is None
    (tmp_path / "own").write_text("0::/job/step\n")
    for group, most, taken in (("job/step", "max", 300), ("job", "1000", 900), ("", "9000", 5000)):
        folder = tmp_path / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text(f"{taken}\n")
        (folder / "memory.stat").write_text("anon 500\nfile 400\nshmem 350\nactive_file 20\ninactive_file 30\n")
    assert control_groups.memory_left() == 150
