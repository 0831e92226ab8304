"""What the user sees: a line for each step, and the errors in a log."""

import re
import shlex
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Iterator, List


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


@contextmanager
def step(what: str) -> Iterator[None]:
    """Print what is being done and, on the same line, how long it took; on a terminal, count the seconds meanwhile."""
    line = "==> {} ... ".format(what)
    print(line, end="", flush=True)
    start = time.monotonic()
    finished = threading.Event()

    def tick() -> None:
        while not finished.wait(1):
            print("\r{}{:.0f} s".format(line, time.monotonic() - start), end="", flush=True)

    clock = threading.Thread(target=tick, daemon=True)
    again = "\r" + line if sys.stdout.isatty() else ""
    if again:
        clock.start()
    outcome = "failed"
    try:
        yield
        outcome = "{:.1f} s".format(time.monotonic() - start)
    finally:
        finished.set()
        if again:
            clock.join()
        print(again + outcome, flush=True)


def note_command(command: List[str], log: IO[bytes]) -> None:
    """Write a command to the log, above what it will print."""
    log.write("$ {}\n".format(" ".join(map(shlex.quote, command))).encode())
    log.flush()


def tail_of(log: Path, start: int) -> str:
    """Return the content of a log from the byte `start` on."""
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


def first_errors(log: Path, start: int, limit: int = 4) -> List[str]:
    """Return up to `limit` lines of a log that report errors, or its last lines where none does."""
    lines = [line.strip() for line in tail_of(log, start).splitlines()[1:] if line.strip()]
    found = [line for line in lines if re.search(r"^ERROR:|error:|No space left", line)]
    return ["  " + line[:200] for line in (found or lines[-limit:])[:limit]]


def network_cause(output: str) -> str:
    """Return in brackets why pip could not reach the package index, or "" where its output does not say so."""
    for pattern, words in (
        (r"No space left", "the disk is full"),
        (r"CERTIFICATE_VERIFY_FAILED|SSLError", "its certificate is not trusted: set PIP_CERT"),
        (r"ProxyError|Tunnel connection failed", "the proxy does not answer"),
        (r"NameResolutionError|name resolution|Name or service not known|nodename", "its name is not found"),
        (r"Network is unreachable", "the network is unreachable"),
        (r"[Tt]imed? ?out", "it does not answer"),
        (r"40[137] ", "it refuses access"),
    ):
        if re.search(pattern, output):
            return " ({})".format(words)
    return ""
