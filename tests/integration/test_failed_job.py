"""A job that fails ends with which rank failed first, why, what it printed last and what to type, and says it once."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.launching import HVD_TRAIN, finished, launch_line

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
LIMIT = 1_200_000_000
TRAIN = ["digits", "--augment", "none", "--device", "cpu", "--epochs", "2", "--output-dir", "run"]
TRAIN += ["--model", "tests.support.failing:network"]
END = "the other ranks were stopped"


def ended(launcher: str, fails: str, folder: Path, *before: str) -> tuple[int, list[str]]:
    """The exit code of a job in which a rank fails so, and what it has printed."""
    if launcher == "elastic":
        line = [str(ROOT / "horovodrun_scripts" / "train_elastic.sh"), "-np", "2", "--", *TRAIN]
    else:
        line = launch_line(launcher, 2, HVD_TRAIN, "train", *TRAIN, "--log-dir", "logs")
    code, output = finished(
        [*before, *line],
        folder,
        variables={"FAILS": fails, "PYTHONPATH": str(ROOT)},
    )
    return code, output.splitlines()


def last_lines(lines: list[str]) -> list[str]:
    """horovodrun's line and those below it."""
    number = next(number for number, line in enumerate(lines) if line.startswith("horovodrun: "))
    return lines[number:]


def test_a_segmentation_fault(tmp_path: Path) -> None:
    """It names the user's line, and nobody else prints what was on the stack; the file of the rank has all of it."""
    code, lines = ended("gloo", "1:segv", tmp_path)
    assert code == 139
    name, why, printed, where = last_lines(lines)
    assert name == f"horovodrun: rank 1 on host localhost was killed by signal 11 (SIGSEGV); {END}"
    told = r"  why: native code has used memory .*, at \S+/failing.py, line \d+, in _end \(through string_at\)"
    assert re.fullmatch(told, why)
    assert printed == "  it printed last: the rank ends by segv"
    assert where == "  its whole output: in logs/rank-1.log on localhost"
    assert not any("backtrace" in line for line in lines)
    assert "Fatal Python error" in (tmp_path / "logs" / "rank-1.log").read_text()


def test_a_rank_of_mpi_that_is_killed(tmp_path: Path) -> None:
    """The rank that was killed is named, and not the one that has lost it, where mpirun starts both."""
    code, lines = ended("mpi", "1:kill", tmp_path)
    assert code == 137
    name, why, *more = last_lines(lines)
    assert name == f"horovodrun: rank 1 on host localhost was killed by signal 9 (SIGKILL); {END}"
    assert why.startswith("  why: killed from outside")
    assert "  it printed last: the rank ends by kill" in more
    assert len(more) <= 8


def test_an_error_is_told_once(tmp_path: Path) -> None:
    """The traceback is right above; below it the line of horovodrun is alone."""
    code, lines = ended("gloo", "1:error", tmp_path)
    assert code == 1
    assert last_lines(lines) == [f"horovodrun: rank 1 on host localhost ended with exit code 1; {END}"]


def test_an_elastic_job_says_why_a_worker_is_gone(tmp_path: Path) -> None:
    """One line, with the words and the place, and the job goes on."""
    code, lines = ended("elastic", "1:segv", tmp_path)
    assert code == 0, lines
    (told,) = [line for line in lines if "ended with exit code" in line]
    assert re.fullmatch(
        r"hvd-train: worker localhost\[1\] ended with exit code 139 \(native .*, at .*, in _end .*\)", told
    )


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group whose processes may take little memory; it is gone afterwards."""
    path = Path("/proc/self/cgroup").read_text()
    v1 = re.search(r"^\d+:memory:(.*)$", path, re.MULTILINE)
    own = Path("/sys/fs/cgroup/memory" + v1[1] if v1 else "/sys/fs/cgroup" + path.strip().rpartition("::")[2])
    group = own / f"hvd_train-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(LIMIT))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error.strerror}")
    yield group
    for process in (group / "cgroup.procs").read_text().split():
        (own / "cgroup.procs").write_text(process)
    group.rmdir()


def test_a_rank_without_memory(small_group: Path, tmp_path: Path) -> None:
    """The control group counts the kill, and the line says so, with the limit."""
    enter = ["sh", "-c", f'echo $$ > {small_group}/cgroup.procs && exec "$@"', "sh"]
    code, lines = ended("gloo", "1:memory", tmp_path, *enter)
    assert code == 137, lines
    name, why, *_ = last_lines(lines)
    assert name == f"horovodrun: rank 1 on host localhost was killed by signal 9 (SIGKILL); {END}"
    assert re.match(
        r"  why: killed by the kernel, for want of memory: the limit of 1,2\d\d MB of its control group", why
    )
    assert os.access(tmp_path / "run", os.R_OK)
