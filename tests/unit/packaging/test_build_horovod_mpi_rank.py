"""The guard of an MPI rank: it tells horovodrun how the rank fares, and gives it time to commit."""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from horovod_build.patches import SOURCE_DIR

MPI_RANK = SOURCE_DIR / "horovod" / "runner" / "mpi_rank.py"
COMMITS = "trap 'echo told; sleep 0.2; echo committed; exit 143' TERM; echo trains; while :; do sleep 0.02; done"
DEAF = "trap '' TERM; echo trains; while :; do sleep 0.02; done"
STARTED = "<horovodrun: rank 3 started 0>\n"


@contextmanager
def guarded(script: str, grace_s: float = 60) -> Iterator[subprocess.Popen[str]]:
    """Start a rank under its guard, as mpirun does; the output of both comes as one."""
    command = [sys.executable, "-I", "-S", str(MPI_RANK), str(grace_s), shlex.join(["sh", "-c", script])]
    with subprocess.Popen(
        command,
        env={**os.environ, "PMI_RANK": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def lines(process: subprocess.Popen[str], *expected: str) -> None:
    """Assert that these lines come next."""
    assert process.stdout is not None
    for line in expected:
        assert process.stdout.readline() == f"{line}\n"


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 2", 2), ("kill -9 $$", 137)])
def test_the_end_of_a_rank_is_told(script: str, code: int) -> None:
    """With its exit code, as shells count; mpirun learns of a failed one only when horovodrun has ended the others."""
    with guarded(script) as process:
        lines(process, STARTED.strip(), f"<horovodrun: rank 3 ended {code}>")
        if code == 0:
            assert process.wait(60) == 0
        else:
            assert process.poll() is None


def test_a_command_that_does_not_exist_is_an_end_with_127() -> None:
    """As in a shell, with a line that names it."""
    command = [sys.executable, "-I", "-S", str(MPI_RANK), "5", "no-such-program digits"]
    done = subprocess.run(command, env={"PMI_RANK": "3"}, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 127
    assert done.stderr == f"{STARTED}no-such-program: No such file or directory\n<horovodrun: rank 3 ended 127>\n"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_lets_the_rank_commit(number: signal.Signals) -> None:
    """However often it comes, the rank gets one SIGTERM; its guard stays until mpirun ends it."""
    with guarded(COMMITS) as process:
        lines(process, STARTED.strip(), "trains")
        process.send_signal(number)
        lines(process, "told")
        process.send_signal(number)
        lines(process, "committed", "<horovodrun: rank 3 ended 143>")
        assert process.poll() is None


def test_a_rank_commits_when_mpirun_has_killed_what_it_started() -> None:
    """mpirun kills without waiting; the guard is out of its reach, and the rank has its time."""
    with guarded(COMMITS) as process:
        lines(process, STARTED.strip(), "trains")
        os.killpg(process.pid, signal.SIGKILL)
        lines(process, "told", "committed", "<horovodrun: rank 3 ended 143>")
        assert process.stdout is not None
        assert process.stdout.read() == ""  # the guard has ended too


def test_a_rank_that_does_not_end_is_killed_after_the_grace_time() -> None:
    """With all that it has started."""
    with guarded(f"({DEAF}) & {DEAF}", grace_s=0.3) as process:
        lines(process, STARTED.strip(), "trains", "trains")
        process.send_signal(signal.SIGUSR1)
        lines(process, "<horovodrun: rank 3 ended 137>")
        process.kill()
        assert process.stdout is not None
        assert process.stdout.read() == ""  # nobody is left who could write


def test_a_failed_rank_stays_until_the_others_have_ended() -> None:
    """The first word is for them; mpirun, which would kill them, sees its end after the second one."""
    with guarded("exit 2") as process:
        ended = "<horovodrun: rank 3 ended 2>"
        lines(process, STARTED.strip(), ended)
        process.send_signal(signal.SIGUSR1)
        lines(process, ended)
        assert process.poll() is None
        process.send_signal(signal.SIGUSR1)
        assert process.wait(60) == 0


def test_a_notice_that_was_cut_in_two_comes_again() -> None:
    """mpirun reads in pieces and marks each with the rank, so horovodrun may miss a notice; the guard repeats it."""
    with guarded("exit 2") as process:
        ended = "<horovodrun: rank 3 ended 2>"
        lines(process, STARTED.strip(), ended)
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 30)[0]
        lines(process, ended)
