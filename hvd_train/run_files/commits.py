"""Find the checkpoints of a run folder, and what their headers say. No torch."""

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from hvd_train import plain_file
from hvd_train.errors import UsageError

MAGIC = b"hvd_train checkpoint 2\n"
PAYLOAD_AT = 1 << 16  # bytes; a multiple of every page size, for mmap
_NAME = re.compile(r"step-[0-9]{10}\.ckpt")


def path_of(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint after `step` steps."""
    return folder / "checkpoints" / f"step-{step:010d}.ckpt"


def step_of(path: Path) -> int:
    """Return the number of steps before a checkpoint."""
    return int(path.stem.removeprefix("step-"))


def firsts_of_intervals(paths: Iterable[Path], every: int) -> list[Path]:
    """Return the first checkpoint at or after each multiple of `every` steps."""
    first = dict[int, Path]()
    for path in sorted(paths, key=step_of):
        first.setdefault(step_of(path) // every, path)
    first.pop(0, None)  # before the first multiple
    return [*first.values()]


def committed(folder: Path) -> list[Path]:
    """Return the checkpoints of a run folder, newest first; they may be damaged. Raises OSError."""
    try:
        # Path.glob would find nothing in a folder that it cannot read
        names = os.listdir(folder / "checkpoints")
    except FileNotFoundError:
        return []
    return [
        folder / "checkpoints" / name
        for name in sorted(filter(_NAME.fullmatch, names), reverse=True)
    ]


def of_run(folder: Path) -> list[Path]:
    """Return what `committed` does. Raises UsageError."""
    try:
        return committed(folder)
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}") from None


def is_verified(path: Path) -> bool:
    """Return whether all ranks had compared the state in a checkpoint before it was written."""
    try:
        with plain_file.opened(path) as file:
            file.readline(64)
            return json.loads(file.readline(PAYLOAD_AT))["verified"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def described(folder: Path) -> str:
    """Return in one line which checkpoints there are. Raises UsageError."""
    known = {True: list[str](), False: list[str]()}
    for path in reversed(of_run(folder)):
        known[is_verified(path)].append(str(step_of(path)))
    compared, others = (", ".join(steps) or "none" for steps in known.values())
    return f"commits that all ranks had compared: {compared}; other commits: {others}"
