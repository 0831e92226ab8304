"""An exit code in words, what the kernel says about memory, and one rank that prints for a host."""

import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from hvd_train.launch import cause, client


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-9, "was killed by signal 9 (SIGKILL), as the kernel does if memory is short"),
        (139, "was killed by signal 11 (SIGSEGV)"),
        (128, "ended with exit code 128"),
    ],
)
def test_an_exit_code_in_words(code: int, words: str) -> None:
    assert cause.in_words(code) == words


@pytest.mark.parametrize(
    ("membership", "counter", "limit"),
    [
        ("0::/job/task", "sys/fs/cgroup/job/memory.events", "memory.max"),
        (
            "4:memory:/job/task\n1:cpu:/",
            "sys/fs/cgroup/memory/job/memory.oom_control",
            "memory.limit_in_bytes",
        ),
        ("0::/job/task", "proc/vmstat", None),
    ],
)
def test_what_the_kernel_kills_for_memory(membership: str, counter: str, limit: str | None) -> None:
    """Each kill is reported once, with the limit of its cgroup (version 1 or 2), if it has one."""
    file = Path(counter)
    for folder in (Path("proc/self"), file.parent):
        folder.mkdir(parents=True, exist_ok=True)
    Path("proc/self/cgroup").write_text(membership)
    file.write_text("oom 1\noom_kill 1\n")
    if limit:
        file.with_name(limit).write_text(f"{3 * 2**30}\n")
    assert cause.killed_for_memory(Path()) == ""
    file.write_text("oom 1\noom_kill 2\n")
    line = cause.killed_for_memory(Path())
    assert "the kernel has killed a process for lack of memory" in line
    assert line.endswith("/job is 3.0 GiB") == bool(limit)
    assert cause.killed_for_memory(Path()) == ""


def test_one_rank_of_a_host_prints_a_text() -> None:
    # other runs of the tests on this machine have other jobs
    one, other = (
        {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4", client.KEY: uuid4().hex} for _ in range(2)
    )
    assert cause.is_first_on_host(one, "item 7 is torn")
    assert not cause.is_first_on_host(one, "item 8 is torn")
    assert cause.is_first_on_host(other, "item 7 is torn")
    assert all(cause.is_first_on_host({}, "no job") for _ in range(2))


def test_a_crash_in_c_prints_where_python_was() -> None:
    program = """
import ctypes
from hvd_train.launch import cause
def mine():
    ctypes.string_at(0)
cause.show_native_crashes()
mine()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -11
    assert " in mine\n" in done.stderr
