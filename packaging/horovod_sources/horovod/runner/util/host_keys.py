"""Choose which host keys ssh accepts, and describe a refused key in one line.

The user's ssh configuration decides. If it says nothing (ssh's default is to ask, but a job cannot answer), the key of
a new host is accepted and kept; ssh always refuses a key that has changed.
"""

from __future__ import annotations

import re
import subprocess
from shlex import quote
from typing import Protocol

_LIMIT_S = 10.0  # for the user's own commands in `Match exec`
_REFUSED = "Host key verification failed."
_EDGE = "@" * 40  # of ssh's warning, which takes fifteen lines
_GOES_ON = "to avoid man-in-the-middle attacks"  # its last line if the user's configuration accepts any key
_KNOWN_AS = re.compile(r"Host key for (\S+) has changed")
_FILE = re.compile(r"Offending \S+ key in (.+):\d+")


def option(host: str) -> str:
    """Return the ssh option that accepts new host keys, or "" if the user's configuration decides."""
    try:
        done = subprocess.run(
            ["ssh", "-G", "--", host],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):  # then ssh itself will say what is wrong
        return ""
    return "-o StrictHostKeyChecking=accept-new" if "stricthostkeychecking ask" in done.stdout.splitlines() else ""


def problem(host: str, output: str) -> str | None:
    """Return one line on a host key that ssh refused, with what to type; None if `output` shows none."""
    if _REFUSED not in output:
        return None
    if "HAS CHANGED" in output:
        known_as, file = _KNOWN_AS.search(output), _FILE.search(output)
        forget = f"-f {quote(file[1].strip())} " if file else ""
        forget += f"-R {quote(known_as[1] if known_as else host)}"
        return (
            f"{host} has another ssh host key than the known one, so it may be another machine; "
            f"if you know why, forget the old key: ssh-keygen {forget}"
        )
    return (
        f"{host} has an ssh host key that is not known here, and your ssh configuration accepts no new ones; "
        f"to compare and accept it: ssh -o StrictHostKeyChecking=ask {host} true"
    )


class Stream(Protocol):
    """A stream to write text to."""

    def write(self, text: str, /) -> object:
        """Write text."""

    def flush(self) -> object:
        """Flush the stream."""


class OneLine:
    """A stream that passes on the output of ssh, with one line instead of its warning of fifteen lines."""

    def __init__(self, stream: Stream, host: str) -> None:
        """Write the output of the ssh to this host to `stream`."""
        self._stream = stream
        self._host = host
        self._warning = ""

    def write(self, text: str) -> None:
        """Accept one line, with its line end and perhaps a prefix."""
        if self._warning or _EDGE in text:
            self._warning += text
            if _REFUSED not in text and _GOES_ON not in text and self._warning.count("\n") < 30:
                return
            text, self._warning = self._warning, ""
        message = problem(self._host, text)
        self._stream.write(f"horovodrun: {message}\n" if message else text)

    def flush(self) -> None:
        """Flush the stream; an unfinished warning stays here."""
        self._stream.flush()

    def close(self) -> None:
        """Write an unfinished warning as it is; the stream stays open."""
        if self._warning:
            self._stream.write(self._warning)
            self._warning = ""
