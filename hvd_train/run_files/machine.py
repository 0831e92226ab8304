"""What a run or a measurement runs on: versions, hosts and devices, for environment.json and records. No torch."""

from __future__ import annotations

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
from hvd_train.run_files import durable
from hvd_train.run_files.run_folder import ENVIRONMENT


def write(folder: Path, hosts: Sequence[str], gpu: str | None) -> None:
    """Write down what there is now; `hosts`: that of each rank; `gpu`: this rank's. Raises OSError."""
    durable.write_text(folder / ENVIRONMENT, json.dumps(surroundings(hosts, gpu), indent=1) + "\n")


def surroundings(hosts: Sequence[str], gpu: str | None) -> dict[str, Any]:
    """The facts, as this rank sees them; those of devices and versions are equal or alike on the others."""
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
    """Of what computes here; torch's names its CUDA."""
    found = {"hvd_train": __version__, "python": platform.python_version()}
    for name in ("torch", "torchvision", "horovod", "numpy"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def processor() -> str:
    """Its name, as it gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
