"""Whether the kernel has killed a process for want of memory, as its control groups and its log tell. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ASK_KERNEL = "dmesg | grep -i 'killed process'"
_OWN_GROUPS, _GROUPS, _LOG = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"), Path("/dev/kmsg")
_COUNTS, _LIMITS = ("memory.events", "memory.oom_control"), ("memory.max", "memory.limit_in_bytes")  # of cgroups v2, v1
_NO_LIMIT = 1 << 60  # of v1, where a group without a limit has this one and more
_MOST_LINES, _LONGEST_LINE = 10_000, 8192  # of the kernel's log that are read: it may be flooded
_KILLED = re.compile(r"Killed process \d+ \(([^)]*)\).*?anon-rss:(\d+)kB")


class Watch:
    """Looks at the control groups of this process, and at the kernel's log where a plain user may, from now on.

    The ranks that a launcher starts on its own host are in the same groups.
    """

    def __init__(self, own: Path = _OWN_GROUPS, groups: Path = _GROUPS, log: Path = _LOG) -> None:
        self._groups = list(_around(own, groups))
        self._told = self._kills()
        self._killed: list[str] = []
        self._log: int | None = None
        with suppress(OSError):
            self._log = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._log, 0, os.SEEK_END)

    def who_has_killed(self) -> str:
        """Return who has sent SIGKILL to a process of this host since this watch began, as far as can be known.

        Each call is about one process more: a kill for want of memory is told once.
        """
        now = self._kills()
        risen = [group for group in self._groups if now.get(group, 0) > self._told.get(group, 0)]
        self._told = {group: min(self._told.get(group, 0) + 1, count) for group, count in now.items()}
        found = filter(None, map(_KILLED.search, self._new_lines()))
        self._killed += [f"{match[1]}, {int(match[2]) / 1000:,.0f} MB" for match in found]
        size = f" ({self._killed.pop(0)})" if self._killed else ""
        if risen:
            limit = min(filter(None, map(_limit, self._groups)), default=None)
            of = "" if limit is None else f" of {limit / 1e6:,.0f} MB"
            return f"by the kernel, for want of memory: the limit{of} of its control group{size}"
        if size:
            return f"by the kernel, for want of memory on this host{size}"
        if self._log is not None:
            return "from outside, as by kill -9 or a batch system: the kernel's log has no kill for want of memory"
        likely = "its control group counts no kill for want of memory" if now else "most likely for want of memory"
        return f"from outside; {likely}; what the kernel says: sudo {ASK_KERNEL}"

    def _kills(self) -> dict[Path, int]:
        """Return how many processes each group counts as killed for want of memory; only groups that can be read."""
        counts = {}
        for group in self._groups:
            for name in _COUNTS:
                with suppress(OSError, ValueError):
                    values = dict(line.split() for line in (group / name).read_text(encoding="ascii").splitlines())
                    if "oom_kill" in values:
                        counts[group] = int(values["oom_kill"])
        return counts

    def _new_lines(self) -> list[str]:
        """Return the lines that have come to the kernel's log since it was read last; none where it may not be read."""
        lines: list[str] = []
        while self._log is not None and len(lines) < _MOST_LINES:
            try:
                line = os.read(self._log, _LONGEST_LINE)
            except BrokenPipeError:  # some were overwritten before they were read
                continue
            except OSError:
                break
            if not line:
                break
            lines.append(line.decode("utf-8", "replace"))
        return lines


def _around(own: Path, groups: Path) -> Iterator[Path]:
    """Yield the folders of the groups that limit the memory of this process, its own first."""
    with suppress(OSError, ValueError):
        for line in own.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            top = groups / controllers
            folder = top / path.lstrip("/")
            yield from (one for one in (folder, *folder.parents) if one.is_relative_to(top) and one.is_dir())


def _limit(group: Path) -> int | None:
    """Return how many bytes a group may take; None where there is no limit."""
    for name in _LIMITS:
        with suppress(OSError, ValueError):  # "max" is no number
            limit = int((group / name).read_text(encoding="ascii"))
            if limit < _NO_LIMIT:
                return limit
    return None
