"""Describe the machine of a run or a benchmark for environment.json: versions, hosts and devices."""

import json
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
from hvd_train.run_files.run_folder import ENVIRONMENT, RunFolder


def write(folder: RunFolder, hosts: Sequence[str], gpu: str | None) -> None:
    """Write environment.json into a run folder; see `environment`. Raises OSError."""
    folder.write(ENVIRONMENT, json.dumps(environment(hosts, gpu), indent=1) + "\n")


def environment(hosts: Sequence[str], gpu: str | None) -> dict[str, Any]:
    """Return this rank's environment for JSON. `hosts` has the host name of each rank, `gpu` names this rank's GPU."""
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "host": socket.gethostname(),
        "world_size": len(hosts),
        "ranks_of_hosts": dict(Counter(hosts)),
        "device": gpu or processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that compute."""
    found = {"hvd_train": __version__, "python": platform.python_version()}
    for name in ("torch", "torchvision", "horovod", "numpy"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def processor() -> str:
    """Return the processor's model name, or else its architecture."""
    with suppress(OSError):  # psutil and platform.processor() do not know the model name
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
