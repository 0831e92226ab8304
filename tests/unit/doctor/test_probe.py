"""Questions put to child processes: what comes back, and that nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import psutil
import pytest

from hvd_train.doctor import probe
from hvd_train.doctor.probe import ANSWER, Ran
from tests.support.launching import wait_for

# Starts a process in a session of its own that no polite signal ends, and waits as a launcher does.
LAUNCHER = """
import subprocess, sys, signal
subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], start_new_session=True)
signal.pause()
"""
STUBBORN = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[1], "w") as told:
    told.write(str(os.getpid()))
signal.pause()
"""


def run(program: str, timeout_s: float = 60.0) -> Ran:
    with probe.commands(os.environ) as commands:
        return commands.start([sys.executable, "-c", program], timeout_s).result()


def test_what_a_command_gives() -> None:
    """Exit code and all output, of both streams."""
    ran = run("import sys; print('out', flush=True); print('err', file=sys.stderr); sys.exit(3)")
    assert (ran.code, ran.output.split()) == (3, ["out", "err"])


def test_a_command_that_is_not_there_is_an_answer() -> None:
    """A program without its interpreter does not raise."""
    with probe.commands(os.environ) as commands:
        ran = commands.start(["/nowhere/horovodrun"], 60.0).result()
    assert ran.code == 127
    assert "/nowhere/horovodrun" in probe.answer(ran)["error"]


def test_a_command_that_hangs_is_ended() -> None:
    """When the time is up the command is gone, and its answer says so."""
    ran = run("import signal; signal.pause()", timeout_s=0.0)
    assert ran.code is None
    assert probe.answer(ran)["error"] == "no end in 0 s"


def test_workers_in_sessions_of_their_own_end_with_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the block leaves no process and no folder, not even one that ignores SIGTERM."""
    monkeypatch.setattr(probe, "_GRACE_S", 0.2)
    told = tmp_path / "pid"
    os.mkfifo(told)
    with contextlib.suppress(KeyboardInterrupt), probe.commands(os.environ) as commands:
        command = commands.start([sys.executable, "-c", LAUNCHER, STUBBORN, told], 60.0)
        worker = psutil.Process(int(told.read_text()))  # waits until the worker is there
        assert command.process
        folder = Path(worker.environ()["TMPDIR"])
        assert folder.is_dir()
        raise KeyboardInterrupt
    assert command.process.poll() is not None
    # Killed it is; the kernel may still be at it.
    wait_for("the end", lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, limit_s=5)
    assert not folder.exists()


def test_other_commands_of_the_block_go_on_when_one_ends() -> None:
    """The end of one command sweeps up after that one only."""
    with probe.commands(os.environ) as commands:
        waiting = commands.start([sys.executable, "-c", "import signal; signal.pause()"], 60.0)
        assert commands.start([sys.executable, "-c", ""], 60.0).result().code == 0
        assert waiting.process
        assert waiting.process.poll() is None


@pytest.mark.parametrize(
    ("ran", "facts"),
    [
        (Ran(0, f'noise\n[1,0]<stdout>:{ANSWER}{{"size": 2}}\n'), {"size": 2}),
        (Ran(0, f'{ANSWER}{{"a": 1}}\n{ANSWER}{{"a": 2}}\n'), {"a": 2}),
        (Ran(-11, f'{ANSWER}{{"a": 1}}\n'), {"a": 1, "error": "killed by SIGSEGV"}),
        (Ran(1, "ValueError: why\n"), {"error": "ValueError: why"}),
        (Ran(5, ""), {"error": "exit code 5, and no word of why"}),
        (Ran(None, "", 7.0), {"error": "no end in 7 s"}),
    ],
)
def test_answers(ran: Ran, facts: dict[str, object]) -> None:
    """The last thing told counts; a crash, a failure and a hang are errors even after an answer."""
    assert probe.answer(ran) == facts


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("Traceback (most recent call last):\n  File x\nOSError: no route to host\n", "OSError: no route to host"),
        ("[1,1]<stderr>:horovod.common.HorovodInternalError: broken\n", "horovod.common.HorovodInternalError: broken"),
        ("-----\nThere are not enough slots available\n-----\n", "There are not enough slots available"),
        ("-----\nmpirun was unable to find\nthe executable.\nTo fix:\n", "mpirun was unable to find the executable."),
        ("[0] Abort(1): Fatal error in MPI_Init\n", "Abort(1): Fatal error in MPI_Init"),
        ("\n----\nsomething odd\nmore\n", "something odd"),
        ("", ""),
    ],
)
def test_first_error(output: str, line: str) -> None:
    """Of all the lines a launcher prints, the one that says what went wrong."""
    assert probe.first_error(output) == line
