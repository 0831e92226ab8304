"""The lines that end a failed job."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_train.launch import failed_job
from hvd_train.launch.failed_job import End
from hvd_train.launch.memory_kills import Watch
from hvd_train.launch.printed import Printed

TRAIN = ["horovodrun", "-np", "2", "/venv/bin/hvd-train", "train", "digits"]


def printed(*lines: str) -> Printed:
    """What is kept of a rank that has printed these lines, after which another one has printed something."""
    kept = Printed()
    for line in lines:
        kept.take(line)
    Printed().take("another rank's line")
    return kept


def ends(*codes: int) -> list[End]:
    """Ranks 0, 1, ... that have ended in this order."""
    return [End(rank, "h1", code) for rank, code in enumerate(codes)]


@pytest.mark.parametrize(
    ("codes", "rank"),
    [
        ((0, 137, 3), 1),
        ((3, 139), 1),  # rank 0 was faster than the core dump
        ((3, 143, 137), 0),  # the launcher has ended these two
        ((3, 255), 0),  # and the ssh to this one
        ((3, 3), 0),  # sys.exit(3) of the user's, and the answer to it
        ((134, 139), 0),
        ((143, 1), 0),
    ],
)
def test_who_failed_first(codes: tuple[int, ...], rank: int) -> None:
    """The first by time, but for a rank that has only lost another one."""
    found = failed_job.first(ends(*codes))
    assert found is not None
    assert found.rank == rank
    assert failed_job.first(ends(0, 0)) is None


@pytest.mark.parametrize("code", [2, 75, 129, 130, 138, 143])
def test_nothing_is_said_of_wrong_input_and_of_a_stop(code: int) -> None:
    """The rank has told it in one line."""
    assert failed_job.summary(End(1, "h1", code, printed("last")), None, TRAIN) == []


@pytest.mark.parametrize("code", [1, 3, 8])
def test_an_error_that_was_told_is_not_told_again(code: int) -> None:
    """Neither the line of hvd_train nor the traceback above it."""
    assert failed_job.summary(End(1, "h1", code, printed("hvd-train: out of memory")), None, TRAIN) == []


def test_a_killed_rank(tmp_path: Path) -> None:
    """Why, what it printed last, where all of it is, and what to type; on another host, where to look."""
    end = End(1, "h2", 137, printed("one", "two", "three"))
    watch = Watch(tmp_path, tmp_path, tmp_path / "none")
    kernel = "what the kernel says: {}dmesg | grep -i 'killed process'"
    rest = [
        "  it printed last: two",
        "                   three",
        "  its whole output: in logs/rank-1.log on h2",
        "  next: the same command goes on from the last commit",
    ]
    assert failed_job.summary(end, watch, [*TRAIN, "--log_dir=logs"]) == [
        f"  why: killed from outside; most likely for want of memory; {kernel.format('sudo ')}",
        *rest,
    ]
    assert failed_job.summary(end, None, [*TRAIN, "--log-dir", "logs"]) == [
        f'  why: killed from outside, most likely for want of memory; {kernel.format("ssh h2 " + chr(34))}"',
        *rest,
    ]


def test_what_was_told_right_above_is_left_out() -> None:
    """Its last lines where nobody has printed anything since, and that the same command goes on."""
    kept = Printed()
    kept.take("last")
    told = printed("hvd-train: step 3 is committed; the same command goes on from there")
    kept.take("very last")
    lines = failed_job.summary(End(1, "h1", 137, kept), None, TRAIN, [kept, told])
    assert [line.split(":")[0].strip() for line in lines] == ["why", "its whole output"]


def test_a_run_that_was_to_begin_anew_does_not_do_so_next() -> None:
    """The same command would put what was trained aside."""
    lines = failed_job.summary(End(0, "h1", 137), None, [*TRAIN, "--resume", "never"])
    assert lines[-1] == "  next: the same command without --resume never goes on from the last commit"


def test_an_error_of_another_program() -> None:
    """Of a program that is not ours the last line of the traceback is told where others have printed after it."""
    kept = printed("Traceback (most recent call last):", '  File "a.py", line 1', "KeyError: 1")
    assert failed_job.summary(End(1, "h1", 1, kept), None, ["horovodrun", "python", "a.py"]) == ["  why: KeyError: 1"]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (3, "its program has ended itself, as by sys.exit(3): hvd_train has not told that another rank was lost, "),
        (127, "there is no such program on that host"),
        (134, "native code has ended itself, as after a check that failed"),
        (135, "/dev/shm or a disk is full (df -h /dev/shm), or a mapped file was cut short"),
        (255, "the ssh to that host has failed"),
        (7 + 64, ""),
    ],
)
def test_exit_codes_in_words(code: int, says: str) -> None:
    """Those of the project, of signals, of shells and of ssh; there is nothing to say of others."""
    told = failed_job.meaning(code, Printed(), None, "h1")
    assert says in told
    assert bool(says) == bool(told)


def test_ten_lines_are_the_most() -> None:
    """Whatever a rank prints: the launcher's own line and these."""
    kept = printed(*(f"line {number}" for number in range(1000)), "Fatal Python error: Aborted", "x" * 1000)
    assert len(failed_job.summary(End(1, "h1", 134, kept), None, [*TRAIN, "--resume=never"])) <= 9
