"""What keeps a job going: when its command is given again, when not, and how it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvd_train.elastic.roster import TOO_FEW_WORKERS
from hvd_train.elastic.supervisor import FINAL, LONGEST_WAIT_S, STEADY_S, Patience
from tests.support.launching import wait_for


def supervise(command: str, restarts: int = 3) -> subprocess.CompletedProcess[str]:
    """Run a shell command under the supervisor."""
    program = [
        sys.executable,
        "-m",
        "hvd_train.elastic.supervisor",
        "--restarts",
        str(restarts),
        "--",
        "sh",
        "-c",
        command,
    ]
    return subprocess.run(program, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("code", FINAL)
def test_a_job_that_has_ended_for_good_is_left_at_that(code: int) -> None:
    """Done, wrong settings, hopeless, or stopped with a commit."""
    done = supervise(f"echo once >> log; exit {code}")
    assert done.returncode == code
    assert Path("log").read_text() == "once\n"


def test_a_job_that_broke_off_goes_on() -> None:
    """The same command again, which is told that it goes on: --resume never holds for the first start alone."""
    begun = time.monotonic()
    own_session = 'test $(cut -d" " -f6 /proc/$$/stat) = $$ -a $HVD_TRAIN_SUPERVISOR = $PPID || exit 2'
    told = 'echo "$HVD_TRAIN_STARTED $HVD_TRAIN_OWNER $HVD_TRAIN_GRACE_SECONDS" >> job'
    notes = f'{own_session}; {told}; echo "$HVD_TRAIN_GOES_ON" >> log'
    done = supervise(f"{notes}; test $(wc -l < log) = 2 || exit 1")
    assert done.returncode == 0
    assert Path("log").read_text() == "\n1\n"
    assert "the job ended with exit code 1; it goes on from its last commit in 2 s" in done.stderr
    first, second = Path("job").read_text().splitlines()
    assert first == second, "it is as old as its first attempt, and may take over the folder of the one before"
    started, owner, grace_s = first.split()
    assert begun <= float(started) <= time.monotonic() - 2
    assert owner
    assert grace_s == "30", "a large model takes longer to commit than the 5 s that a launcher gives"


def test_a_job_that_fails_again_and_again_is_given_up() -> None:
    """With its own exit code and the number of attempts."""
    done = supervise("exit 7", restarts=1)
    assert done.returncode == 7
    assert "failed 2 times in a row" in done.stderr


def test_waits_grow_and_a_steady_life_makes_good() -> None:
    """A job that lives for minutes between faults is never given up."""
    patience = Patience(restarts=3)
    assert [patience.wait_after(1, 1) for _ in range(3)] == [2, 4, 8]
    assert patience.wait_after(STEADY_S, 1) == 2
    assert [patience.wait_after(STEADY_S, 1) for _ in range(20)] == [2] * 20
    patience = Patience(restarts=20)
    waits = [patience.wait_after(1, 1) or 0 for _ in range(20)]
    assert max(waits) == LONGEST_WAIT_S


def test_a_job_that_never_finds_workers_is_given_up() -> None:
    """The driver waits for them for longer than a steady life takes, which must not make each attempt a good one."""
    patience = Patience(restarts=2)
    assert [patience.wait_after(2 * STEADY_S, TOO_FEW_WORKERS) for _ in range(3)] == [2, 4, None]


def test_a_signal_ends_it_all() -> None:
    """It goes to the command, which ends in its own way; there is no next attempt."""
    program = [sys.executable, "-m", "hvd_train.elastic.supervisor", "--", "sh", "-c"]
    command = "trap 'echo stopped > log; exit 9' TERM; touch up; while :; do sleep 0.1; done"
    with subprocess.Popen([*program, command], stderr=subprocess.PIPE, text=True) as process:
        wait_for("the command to run", lambda: Path("up").exists())
        started = time.monotonic()
        process.terminate()
        _, printed = process.communicate(timeout=20)
        assert process.returncode == 9
    assert printed == ""
    assert time.monotonic() - started < 20
    assert Path("log").read_text() == "stopped\n"


def test_a_terminal_that_is_gone_stops_the_job_once() -> None:
    """Its SIGHUPs are one wish to commit and end, which the command hears as one SIGTERM."""
    program = [sys.executable, "-m", "hvd_train.elastic.supervisor", "--", "sh", "-c"]
    command = "trap 'echo stopped >> log; sleep 0.5; exit 143' TERM; touch up; while :; do sleep 0.1; done"
    with subprocess.Popen([*program, command]) as process:
        wait_for("the command to run", lambda: Path("up").exists())
        for _ in range(3):
            process.send_signal(signal.SIGHUP)
        wait_for("the command to hear of it", lambda: Path("log").exists())
        process.send_signal(signal.SIGHUP)
        assert process.wait(20) == 143
    assert Path("log").read_text() == "stopped\n"


def test_a_job_that_a_signal_ends_has_the_exit_code_of_shells() -> None:
    """128 + its number: a batch system tells a killed launcher from one that failed."""
    assert supervise("kill -9 $$", restarts=0).returncode == 137


def test_a_signal_between_two_attempts_ends_it_all() -> None:
    """With the exit code of the last one; the command is not started for it."""
    program = [sys.executable, "-m", "hvd_train.elastic.supervisor", "--", "sh", "-c", "echo once >> log; exit 7"]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "it goes on from its last commit in 2 s" in process.stderr.readline()
        process.terminate()
        assert process.wait(20) == 7
    assert Path("log").read_text() == "once\n"
