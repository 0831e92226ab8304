"""Find processes on this host by their environment, which all descendants of a launcher share; age of this process."""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil


def started_with(variables: Mapping[str, str]) -> list[psutil.Process]:
    """Return the other processes whose environment had these variables at the start, if it can be read."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # ended, a zombie, or another user's
            environment = process.environ()
            if process.pid != os.getpid() and variables.items() <= environment.items():
                found.append(process)
    return found


def age_s() -> float:
    """Return the seconds since this process started, by the clock since boot, which no user can set."""
    since_boot = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[19]
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(since_boot) / os.sysconf("SC_CLK_TCK")
