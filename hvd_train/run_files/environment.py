"""Describe the command, the machine and the versions of a run, for environment.json and records."""

import os
import platform
import shlex
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from hvd_train._version import __version__

_PACKAGES = "torch", "torchvision", "horovod", "numpy"


def environment(hosts: Sequence[str], gpu: str | None) -> dict[str, Any]:
    """Return this rank's environment; `hosts` has the host name of each rank, `gpu` its GPU's."""
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "world_size": len(hosts),
        "ranks_of_hosts": dict(Counter(hosts)),
        "device": gpu or processor(),
        "host": socket.gethostname(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "versions": _versions(),
    }


def processor() -> str:
    """Return the name of this machine's processor."""
    # platform.processor() has no model name
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _versions() -> dict[str, str]:
    versions = {"hvd_train": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions
