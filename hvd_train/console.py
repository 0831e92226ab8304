"""The program's name, and the one way in which it prints a line about itself beside the results of a command."""

from __future__ import annotations

import sys

PROGRAM = "hvd-train"


def say(message: str) -> None:
    """Print one line, `hvd-train: message`, to standard error at once."""
    print(f"{PROGRAM}: {message}", file=sys.stderr, flush=True)
