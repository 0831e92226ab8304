"""Child processes of the doctor: how they end, and that nothing of them stays behind."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import psutil
import pytest

from hvd_train.doctor import children, questions
from hvd_train.doctor.children import Outcome
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
with open(sys.argv[1], "w") as pipe:
    pipe.write(str(os.getpid()))
signal.pause()
"""


def run(program: str, timeout_s: float = 60.0) -> Outcome:
    with children.children(os.environ) as group:
        return group.start([sys.executable, "-c", program], timeout_s).outcome()


def test_the_outcome_of_a_child() -> None:
    """The outcome has the exit code and all output of both streams."""
    outcome = run("import sys; print('out', flush=True); print('err', file=sys.stderr); sys.exit(3)")
    assert (outcome.code, outcome.output.split()) == (3, ["out", "err"])


def test_a_command_that_does_not_exist_is_an_answer() -> None:
    """A program that does not exist has exit code 127, and its outcome says so."""
    with children.children(os.environ) as group:
        outcome = group.start(["/nowhere/horovodrun"], 60.0).outcome()
    assert outcome.code == 127
    assert "/nowhere/horovodrun" in questions.answer(outcome)["error"]


def test_a_command_that_hangs_is_ended() -> None:
    """When its time is up it is gone, and its answer says so."""
    outcome = run("import signal; signal.pause()", timeout_s=0.0)
    assert outcome.code is None
    assert questions.answer(outcome)["error"] == "no end in 0 s"


def test_workers_in_sessions_of_their_own_end_with_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the block leaves no process and no folder, not even one that ignores SIGTERM."""
    monkeypatch.setattr(children, "_GRACE_S", 0.2)
    pipe = tmp_path / "pid"
    os.mkfifo(pipe)
    with contextlib.suppress(KeyboardInterrupt), children.children(os.environ) as group:
        child = group.start([sys.executable, "-c", LAUNCHER, STUBBORN, pipe], 60.0)
        worker = psutil.Process(int(pipe.read_text()))  # waits until the worker is there
        assert child.process
        folder = Path(worker.environ()["TMPDIR"])
        assert folder.is_dir()
        raise KeyboardInterrupt
    assert child.process.poll() is not None
    # It is killed by now; the kernel may still be at work on it.
    wait_for("the end", lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, limit_s=5)
    assert not folder.exists()


def test_other_children_of_the_block_go_on_when_one_ends() -> None:
    """The end of one child ends only what that child started."""
    with children.children(os.environ) as group:
        waiting = group.start([sys.executable, "-c", "import signal; signal.pause()"], 60.0)
        assert group.start([sys.executable, "-c", ""], 60.0).outcome().code == 0
        assert waiting.process
        assert waiting.process.poll() is None


def test_what_a_child_left_behind_ends_with_the_block(tmp_path: Path) -> None:
    """A child that has ended by itself leaves nothing that outlives the doctor."""
    pipe = tmp_path / "pid"
    os.mkfifo(pipe)
    leaves = LAUNCHER.replace("signal.pause()", "")
    with children.children(os.environ) as group:
        child = group.start([sys.executable, "-c", leaves, STUBBORN, pipe], 60.0)
        worker = psutil.Process(int(pipe.read_text()))
        assert child.process
        assert child.process.wait(60) == 0
        assert worker.is_running()
    wait_for("the end", lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, limit_s=5)
