"""Whether ssh takes another host for the one that it says it is, and what to say where ssh does not.

The user's ssh configuration decides. Where it says nothing (ssh's default is to ask, and nobody is there to answer), a
host that is new is believed and its key kept; a key that has changed since is refused, as it always is.
"""

from __future__ import annotations

import re
import subprocess
from shlex import quote
from typing import Protocol

_LIMIT_S = 10.0  # for the user's own commands in `Match exec`
_REFUSED = "Host key verification failed."
_EDGE = "@" * 40  # of ssh's warning, which takes fifteen lines
_GOES_ON = "to avoid man-in-the-middle attacks"  # its end where the user has said that the key does not matter
_KNOWN_AS = re.compile(r"Host key for (\S+) has changed")
_FILE = re.compile(r"Offending \S+ key in (.+):\d+")


def option(host: str) -> str:
    """Return the option of ssh that takes new host keys, or "" where the user's configuration of this host decides."""
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
    """Return one line on a host whose key ssh has refused, and what to type; None where `output` says no such thing."""
    if _REFUSED not in output:
        return None
    if "HAS CHANGED" in output:
        known_as, file = _KNOWN_AS.search(output), _FILE.search(output)
        forget = f"-f {quote(file[1].strip())} " if file else ""
        forget += f"-R {quote(known_as[1] if known_as else host)}"
        return (
            f"{host} has another ssh host key than the one that is known here, so it may be another machine; "
            f"if you know why, forget the old key: ssh-keygen {forget}"
        )
    return (
        f"{host} has an ssh host key that is not known here, and your ssh configuration takes no new ones; "
        f"to compare and accept it: ssh -o StrictHostKeyChecking=ask {host} true"
    )


class Stream(Protocol):
    """Where text is written."""

    def write(self, text: str, /) -> object:
        """Write a text."""

    def flush(self) -> object:
        """Pass on what is written."""


class OneLine:
    """A stream that passes on what ssh and its command print, and puts one line in the place of ssh's warning."""

    def __init__(self, stream: Stream, host: str) -> None:
        """Write to `stream` what the ssh to this host prints."""
        self._stream = stream
        self._host = host
        self._warning = ""

    def write(self, text: str) -> None:
        """Take one line, with its line end and perhaps a prefix."""
        if self._warning or _EDGE in text:
            self._warning += text
            if _REFUSED not in text and _GOES_ON not in text and self._warning.count("\n") < 30:
                return
            text, self._warning = self._warning, ""
        message = problem(self._host, text)
        self._stream.write(f"horovodrun: {message}\n" if message else text)

    def flush(self) -> None:
        """Pass on what is written, except the half of a warning."""
        self._stream.flush()

    def close(self) -> None:
        """Pass on the half of a warning as it is; the stream stays open."""
        if self._warning:
            self._stream.write(self._warning)
            self._warning = ""
