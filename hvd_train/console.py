"""The program's name, and the one printer of lines about the program itself, apart from a command's results."""

from __future__ import annotations

import sys

PROGRAM = "hvd-train"


def say(message: str) -> None:
    """Print one line, `hvd-train: message`, to standard error at once."""
    print(f"{PROGRAM}: {message}", file=sys.stderr, flush=True)
