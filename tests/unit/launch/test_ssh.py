"""Other hosts over ssh, by a program of this name that answers as the test wants."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hvd_train.launch.ssh import is_here, problems

PROGRAM = Path("/a folder/hvd-train")
CHANGED = "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed."


def ssh(monkeypatch: pytest.MonkeyPatch, answer: str, code: int) -> None:
    """Put an ssh on the PATH that prints an answer on stderr, ends with a code and writes down what it was asked."""
    Path("ssh").write_text(
        f"#!/bin/sh\n[ $1 = -G ] || printf '%s\\n' \"$*\" >>asked\ncat >&2 <<'.'\n{answer}\n.\nexit {code}\n"
    )
    Path("ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path.cwd()}:/usr/bin:/bin")


def test_this_machine_needs_no_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its names are known; any other name is another host's."""
    assert is_here("localhost")
    assert is_here(socket.gethostname())
    assert not is_here("h1.invalid")
    monkeypatch.setenv("PATH", "")
    assert problems(["localhost", "127.0.0.1"], PROGRAM) == []


@pytest.mark.parametrize(
    ("answer", "code", "told"),
    [
        ("", 0, []),
        ("", 1, ["h2 has no /a folder/hvd-train: set up the same environment there"]),
        ("ssh: no route", 255, ["h2 does not let us in by ssh without a password (ssh: no route); try `ssh h2 true`"]),
        ("Host key verification failed.", 255, ["h2 has an ssh host key that is not known here"]),
        (CHANGED, 255, ["h2 has another ssh host key than the one that is known here"]),
    ],
)
def test_each_host_is_a_line(answer: str, code: int, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """That says what to type, or to do; a host where all is well is none."""
    ssh(monkeypatch, answer, code)
    found = problems(["localhost", "h2"], PROGRAM)
    assert [line[: len(start)] for line, start in zip(found, told, strict=True)] == told
    asked = Path("asked").read_text()
    assert asked == "-n -o BatchMode=yes -o ConnectTimeout=5 -- h2 test -x '/a folder/hvd-train'\n"


def test_without_an_ssh_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many hosts there are."""
    monkeypatch.setenv("PATH", "")
    assert problems(["h2", "h3"], PROGRAM) == ["there is no ssh on the PATH: apt install openssh-client"]
