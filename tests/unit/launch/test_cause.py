"""An exit code in words, what the kernel says about memory, and one rank that prints for a host."""

import subprocess
import sys
from pathlib import Path

import pytest

from hvd_train.launch import cause, client


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-9, "was killed by signal 9 (SIGKILL), as the kernel does if memory is short"),
        (137, "was killed by signal 9 (SIGKILL), as the kernel does if memory is short"),
        (139, "was killed by signal 11 (SIGSEGV)"),
        (3, "ended with exit code 3"),
        (128, "ended with exit code 128"),
        (255, "ended with exit code 255"),
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
def test_what_the_kernel_kills_for_memory(
    membership: str, counter: str, limit: str | None, tmp_path: Path
) -> None:
    """Each death is told once, with the limit of its cgroup, of version 1 or 2; without, too."""

    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    write("proc/self/cgroup", membership)
    write(counter, "oom 1\noom_kill 1\n")
    if limit is not None:
        write(str(Path(counter).with_name(limit)), f"{3 * 2**30}\n")
    assert cause.killed_for_memory(tmp_path) == ""
    write(counter, "oom 1\noom_kill 2\n")
    told = cause.killed_for_memory(tmp_path)
    assert "the kernel has killed a process for lack of memory" in told
    assert told.endswith("/job is 3.0 GiB") == (limit is not None)
    assert cause.killed_for_memory(tmp_path) == ""


def test_one_rank_of_a_host_prints_a_text() -> None:
    job = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4", client.KEY: str(Path(__file__))}
    assert cause.is_first_on_host(job, "item 7 is torn")
    assert not cause.is_first_on_host(job, "item 8 is torn")
    assert cause.is_first_on_host({**job, client.KEY: "another job"}, "item 7 is torn")
    assert all(cause.is_first_on_host({}, "no job") for _ in range(2))


def test_a_crash_in_c_prints_where_python_was() -> None:
    crash = "def mine():\n    ctypes.string_at(0)\n\ncause.show_native_crashes()\nmine()"
    program = f"import ctypes\nfrom hvd_train.launch import cause\n{crash}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -11
    assert " in mine\n" in done.stderr
