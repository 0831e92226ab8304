"""A program that answers `hvd-train why`, as ranks do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def answering(tmp_path: Path, then: str, before: str = "") -> Iterator[subprocess.Popen[str]]:
    """Run a program that answers, says that it does, and goes on with `then`."""
    program = tmp_path / "mine.py"
    lines = [before, "from hvd_train.launch import stacks", "stacks.answer_why(); print(1, flush=True)", then]
    program.write_text("\n".join(lines))
    process = subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        yield process
    finally:
        process.kill()
        process.communicate()
