"""The guard of an MPI rank: it reports the end of the rank, and gives it time to commit."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from horovod_build.patches import SOURCE_DIR

GUARD = [sys.executable, "-I", "-S", str(SOURCE_DIR / "horovod" / "runner" / "mpi_rank.py")]
COMMITS = "trap 'echo signal; sleep 0.2; echo committed; exit 143' TERM; echo trains; while :; do sleep 0.02; done"
STARTED = "<horovodrun: rank 3 started 0>"


@contextmanager
def guarded(script: str) -> Iterator[subprocess.Popen[str]]:
    """Start a rank under its guard, as mpirun does; the output of both comes as one."""
    command = [*GUARD, "300", shlex.join(["sh", "-c", script])]
    options = {"env": {**os.environ, "PMI_RANK": "3"}, "text": True, "start_new_session": True}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def lines(process: subprocess.Popen[str], *expected: str) -> None:
    assert process.stdout is not None
    for line in expected:
        assert process.stdout.readline() == f"{line}\n"


def test_the_end_of_a_rank_is_reported() -> None:
    with guarded("exit 0") as process:
        lines(process, STARTED, "<horovodrun: rank 3 ended 0>")
        assert process.wait(60) == 0
    with guarded("kill -9 $$") as process:
        lines(process, STARTED, "<horovodrun: rank 3 ended 137>")
    command = [*GUARD, "5", "no-such-program digits"]
    done = subprocess.run(command, env={"PMI_RANK": "3"}, capture_output=True, text=True, check=False)
    assert done.returncode == 127
    assert done.stderr == f"{STARTED}\nno-such-program: No such file or directory\n<horovodrun: rank 3 ended 127>\n"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_lets_the_rank_commit(number: signal.Signals) -> None:
    """The rank gets one SIGTERM, however many signals its guard gets."""
    with guarded(COMMITS) as process:
        lines(process, STARTED, "trains")
        process.send_signal(number)
        lines(process, "signal")
        process.send_signal(number)
        lines(process, "committed", "<horovodrun: rank 3 ended 143>")


def test_a_rank_commits_when_mpirun_has_killed_what_it_started() -> None:
    """mpirun does not reach the guard."""
    with guarded(COMMITS) as process:
        lines(process, STARTED, "trains")
        os.killpg(process.pid, signal.SIGKILL)
        lines(process, "signal", "committed", "<horovodrun: rank 3 ended 143>")
        assert process.stdout is not None
        assert process.stdout.read() == ""  # the guard has ended, too


def test_a_failed_rank_stays_until_the_others_have_ended() -> None:
    """The guard repeats its report, as mpirun may cut a line; a second signal ends the guard."""
    with guarded("exit 2") as process:
        ended = "<horovodrun: rank 3 ended 2>"
        lines(process, STARTED, ended, ended)
        process.send_signal(signal.SIGUSR1)
        lines(process, ended)
        assert process.poll() is None
        for _ in range(60):
            process.send_signal(signal.SIGUSR1)
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)
        assert process.returncode == 0
