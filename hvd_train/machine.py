"""What a run runs on: versions, hosts and devices, for environment.json in its folder."""

from __future__ import annotations

import json
import os
import platform
import shlex
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from hvd_train import __version__, durable
from hvd_train.run_folder import ENVIRONMENT


def write(folder: Path, hosts: Sequence[str], device: torch.device) -> None:
    """Write down what there is now; `hosts`: that of each rank. Raises OSError."""
    durable.write_text(folder / ENVIRONMENT, json.dumps(surroundings(hosts, device), indent=1) + "\n")


def surroundings(hosts: Sequence[str], device: torch.device) -> dict[str, Any]:
    """The facts, as this rank sees them; those of devices and versions are equal or alike on the others."""
    versions = {"hvd_train": __version__, "Python": platform.python_version()}
    for name in ("torch", "torchvision", "horovod", "numpy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if device.type == "cuda":
        versions["CUDA"] = str(torch.version.cuda)
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "host": socket.gethostname(),
        "world_size": len(hosts),
        "ranks_of_hosts": dict(Counter(hosts)),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "versions": versions,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
