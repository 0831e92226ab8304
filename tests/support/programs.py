"""Scripts in the place of programs of the machine."""

from collections.abc import Callable
from pathlib import Path

Program = Callable[[str, str], Path]  # what the fixture `program` gives: writes a script of that name and body


def write_program(folder: Path, name: str, body: str) -> Path:
    """Write a shell script that is found by its name if the folder is on the PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return path
