"""Finds the processes on this host that were started with certain environment variables, and says how old this one is.

Launchers put what they start into sessions and groups of its own; the environment is what all descendants share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil


def started_with(variables: Mapping[str, str]) -> list[psutil.Process]:
    """Return all processes but the current one whose environment had these variables with these values at the start.

    Processes of other users and zombies, whose environment cannot be read, are left out.
    """
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended meanwhile, or belongs to another user
            environment = process.environ()
            if process.pid != os.getpid() and variables.items() <= environment.items():
                found.append(process)
    return found


def age_s() -> float:
    """Return the seconds since this process was started, by the clock since boot, which no user can set."""
    since_boot = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[19]
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(since_boot) / os.sysconf("SC_CLK_TCK")
