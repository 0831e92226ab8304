"""Who has killed a process: what control groups of both versions and the kernel's log tell."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvd_train.launch.memory_kills import Watch

LINE = "3,1,1,-;Memory cgroup out of memory: Killed process 7 (python3) total-vm:9kB, anon-rss:306432kB, file-rss:0kB\n"


class Machine:
    """A folder that looks like /sys/fs/cgroup, with a job in a group, and a log of the kernel."""

    def __init__(self, folder: Path, version: int) -> None:
        self.own, self.groups, self.log = folder / "cgroup", folder / "groups", folder / "kmsg"
        self.group = self.groups / ("memory" if version == 1 else "") / "jobs" / "mine"
        self.group.mkdir(parents=True)
        self.own.write_text("4:memory:/jobs/mine\n1:cpu:/\n0::/\n" if version == 1 else "0::/jobs/mine\n")
        self.counts = self.group / ("memory.oom_control" if version == 1 else "memory.events")
        (self.group / ("memory.limit_in_bytes" if version == 1 else "memory.max")).write_text("300000000\n")
        unlimited = self.group.parent / ("memory.limit_in_bytes" if version == 1 else "memory.max")
        unlimited.write_text("9223372036854771712\n" if version == 1 else "max\n")
        self.kills(0)

    def kills(self, count: int) -> None:
        self.counts.write_text(f"under_oom 0\noom_kill {count}\n")

    def watch(self) -> Watch:
        return Watch(self.own, self.groups, self.log)


@pytest.mark.parametrize("version", [1, 2])
def test_a_kill_by_the_limit_of_a_group_is_told_once(tmp_path: Path, version: int) -> None:
    """With the limit; one that was there at the start is not told, nor is one again for another process."""
    machine = Machine(tmp_path, version)
    machine.kills(3)
    watch = machine.watch()
    machine.kills(4)
    assert watch.who_has_killed() == "by the kernel, for want of memory: the limit of 300 MB of its control group"
    assert watch.who_has_killed().startswith("from outside; its control group counts no kill for want of memory; ")
    machine.kills(6)
    assert ["by the kernel" in watch.who_has_killed() for _ in range(3)] == [True, True, False]


def test_the_kernels_log_says_how_large_the_process_was(tmp_path: Path) -> None:
    """From its end on, as it was when the watch began."""
    machine = Machine(tmp_path, 2)
    machine.log.write_text(LINE)
    watch = machine.watch()
    assert watch.who_has_killed().startswith("from outside, as by kill -9 or a batch system: the kernel's log has no ")
    with machine.log.open("a") as log:
        log.write(LINE)
    assert watch.who_has_killed() == "by the kernel, for want of memory on this host (python3, 306 MB)"


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    """Neither groups nor log can be read: it is likely, and the line says what to type."""
    watch = Watch(tmp_path / "none", tmp_path / "none", tmp_path / "none")
    assert watch.who_has_killed() == (
        "from outside; most likely for want of memory; what the kernel says: sudo dmesg | grep -i 'killed process'"
    )


def test_nonsense_in_the_files_is_no_error(tmp_path: Path) -> None:
    """Some containers show other files there."""
    machine = Machine(tmp_path, 2)
    machine.own.write_text("nonsense\n")
    assert "from outside" in machine.watch().who_has_killed()
    machine.own.write_text("0::/jobs/mine\n")
    machine.counts.write_text("three words here\n")
    assert "from outside" in machine.watch().who_has_killed()


def test_the_log_is_not_waited_for(tmp_path: Path) -> None:
    """It is read without blocking: a pipe that nobody writes to has no lines."""
    os.mkfifo(tmp_path / "kmsg")
    assert "from outside" in Watch(tmp_path / "none", tmp_path / "none", tmp_path / "kmsg").who_has_killed()
