"""What is seen of a process from outside: its stacks and its record, in Python and in C code, and nothing of others."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from hvd_train.doctor import hang_agent, hang_stacks
from hvd_train.launch import seat
from hvd_train.progress import whereabouts
from tests.support.answering import answering

_HOLDS_GIL = "import ctypes; ctypes.PyDLL(None).sem_wait(ctypes.create_string_buffer(64))"


@pytest.fixture(autouse=True)
def _looks_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_agent, "_BETWEEN_LOOKS_S", 0.1)


def looked_at(process: subprocess.Popen[str]) -> dict[str, object]:
    """Return what the agent sees of a process."""
    started = int(seat.stat_of(process.pid)[1][19])
    answer = hang_agent.look({"ranks": {"0": {"number": process.pid, "started": started}}})
    found: dict[str, object] = answer["ranks"]["0"][0]
    return found


@pytest.mark.parametrize("then", ["import time; time.sleep(60)", _HOLDS_GIL, "while True: pass"])
def test_a_process_tells_where_it_is(tmp_path: Path, then: str) -> None:
    """Also while it computes, and while C code that hangs holds the GIL; it goes on as before."""
    with answering(tmp_path, then) as process:
        found = looked_at(process)
        again = looked_at(process)
        assert process.poll() is None
    for one in (found, again):
        main = hang_stacks.main_thread(hang_stacks.read(str(one["stacks"])))
        assert main is not None
        assert main.their_frame is not None
        assert main.their_frame.place == "mine.py:4"
        assert whereabouts.read(bytes.fromhex(str(one["record"]))).phase == "start"


def test_a_process_that_is_stopped_is_not_asked(tmp_path: Path) -> None:
    """It could not answer, and would when it goes on."""
    with answering(tmp_path, "import time; time.sleep(60)") as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        found = looked_at(process)
        assert (found["state"], found["stacks"]) == ("T", "")


def test_a_process_of_others_is_not_touched() -> None:
    """What has no handler for the signal would end by it."""
    with subprocess.Popen(["sleep", "60"], text=True) as process:
        try:
            assert looked_at(process)["stacks"] == ""
            assert process.poll() is None
        finally:
            process.kill()


def test_another_process_with_the_same_number_is_another_one(tmp_path: Path) -> None:
    """A number of a process is used again; when it was started tells the two apart."""
    with answering(tmp_path, "import time; time.sleep(60)") as process:
        answer = hang_agent.look({"ranks": {"0": {"number": process.pid, "started": 1}}})
        assert answer["ranks"] == {"0": []}
