"""The control groups around this process (cgroups v2), in which containers and schedulers limit what a job may take."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_OWN_GROUP, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_GIVEN_BACK = ("active_file", "inactive_file")  # pages of files on disks: the kernel drops them before memory is short


def around_this_process() -> tuple[Path, ...]:
    """Return the folder of the group of this process, and of each group around it."""
    path = ""
    with suppress(OSError):
        path = _OWN_GROUP.read_text(encoding="utf-8").splitlines()[-1].partition("::")[2].lstrip("/")
    return _GROUPS / path, *(_GROUPS / path).parents


def memory_left() -> int | None:
    """Return how many bytes this process may still take by the limits of its groups; None where there is no limit."""
    left = []
    for group in around_this_process():
        with suppress(OSError, ValueError):  # "max" is no number
            most, taken = (int((group / f"memory.{name}").read_text(encoding="utf-8")) for name in ("max", "current"))
            pages = dict(line.split() for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines())
            left.append(most - taken + sum(int(pages.get(name, 0)) for name in _GIVEN_BACK))
    return min(left, default=None)
