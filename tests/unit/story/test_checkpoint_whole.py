"""Whether a checkpoint is whole is seen without loading it, and before its tensors are given memory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hvd_train.checkpoint import MAGIC, BadCheckpoint, check, read, write
from tests.unit.story.test_checkpoint import state_at

PATH = Path("x.ckpt")


def test_a_whole_file_passes() -> None:
    """As a commit has written it."""
    write(PATH, state_at(5).snapshot())
    check(PATH)


@pytest.mark.parametrize("how", ["one bit", "cut short", "longer", "missing"])
def test_what_cannot_be_read_does_not_pass(how: str) -> None:
    """The error is the one of reading it."""
    write(PATH, state_at(5).snapshot())
    content = PATH.read_bytes()
    if how == "missing":
        PATH.unlink()
    else:
        flipped = content[:-200] + bytes([content[-200] ^ 1]) + content[-199:]
        PATH.write_bytes({"one bit": flipped, "cut short": content[:-1], "longer": content + b"x"}[how])
    with pytest.raises(BadCheckpoint) as of_check:
        check(PATH)
    with pytest.raises(BadCheckpoint) as of_read:
        read(PATH)
    assert str(of_check.value) == str(of_read.value)


@pytest.mark.timeout(60)
def test_a_hole_larger_than_the_memory_is_not_read() -> None:
    """A sparse file takes no disk, and its header may say the right size of it."""
    header = json.dumps({"size": 2**42, "digest": ""}).encode() + b"\n"
    PATH.write_bytes(MAGIC + header)
    os.truncate(PATH, len(MAGIC + header) + 2**42)
    with pytest.raises(BadCheckpoint, match=r"x\.ckpt is larger than the memory"):
        check(PATH)
