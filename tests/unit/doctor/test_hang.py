"""What agents answer becomes what is known of each rank; hosts that do not answer are told apart."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from hvd_train.doctor import hang, hang_agent
from hvd_train.launch import seat
from hvd_train.launch.seat import Process, Seat


@pytest.fixture
def _ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put an ssh on the PATH that fails for each host in its own way."""
    program = tmp_path / "ssh"
    program.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        "*-G*) ;;\n"
        '*"-- cut "*) echo "ssh: connect to host cut port 22: Connection timed out" >&2; exit 255 ;;\n'
        '*"-- locked "*) echo "me@locked: Permission denied (publickey)." >&2; exit 255 ;;\n'
        "*) exec sleep 60 ;;\n"
        "esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.usefixtures("_ssh")
def test_hosts_that_do_not_answer() -> None:
    """One is cut off, one does not let us in, and one says nothing in time; the rank that is here is seen."""
    own = seat.of_this_process({})
    seats = [own, *(Seat(Process(name, 7, 1), name) for name in ("cut", "locked", "silent"))]
    seen = hang.look(seats, 8.0)  # for a busy machine; one host never answers
    assert [rank.out_of_reach for rank in seen.ranks] == [False, True, False, True]
    assert "Permission denied" in seen.ranks[2].silence
    assert seen.ranks[0].process is not None
    assert seen.ranks[0].process.number == os.getpid()
    assert (seen.answer.kind, seen.answer.culprits[0].host) == ("silent", "cut")
    assert seen.is_alive


def test_nothing_is_there_any_more() -> None:
    """A process that has the number of a rank, and was started at another time, is none of the job."""
    seen = hang.look([Seat(Process(socket.gethostname(), os.getpid(), 1), socket.gethostname())], 5.0)
    assert [rank.process for rank in seen.ranks] == [None]
    assert not seen.is_alive


def test_the_state_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load, memory and what has gone over the network are numbers."""
    monkeypatch.setattr(hang_agent, "_BETWEEN_LOOKS_S", 0.0)
    answer: dict[str, Any] = hang_agent.look({"ranks": {}})
    state = hang._state(answer["host"])
    assert 0 < state.memory[1] <= state.memory[0]
    assert state.cores > 0
    assert set(state.network) == {"received", "sent", "again"}
