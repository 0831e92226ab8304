"""Facts such as child processes of the doctor find, and an assertion about a finding."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hvd_train.doctor.findings import Finding
from hvd_train.doctor.horovod_findings import Installed

GB = 2**30
TORCH: dict[str, Any] = {"version": "2.15.0+cu132", "cuda": "13.2", "nccl": "2.30.7", "torchvision": "0.29.2"}
TORCH |= {"threads": 2, "gpus": [], "gpu_warning": ""}
CPU_TORCH: dict[str, Any] = {**TORCH, "version": "2.15.0+cpu", "cuda": None, "nccl": None}
OPEN_MPI_4 = "Open MPI v4.1.8, package: Open MPI user@localhost Distribution, ident: 4.1.8"
HOROVOD: dict[str, Any] = {"gloo": True, "mpi": True, "nccl": True, "libmpi": OPEN_MPI_4}
BUILD: dict[str, Any] = {"horovod": "0.28.1", "torch": "2.15.0+cu132", "torch_cuda": "13.2", "compiler": "g++ 12.2.0"}
BUILD |= {"mpi": "Open MPI 4.1.8 (package index)", "built": "2026-01-02T03:04:05+00:00"}
BUILD |= {"python": "{}.{}.0".format(*sys.version_info)}
BUILD |= {"patches": [{"name": name} for name in ("B1", "C1", "C2", "C3", "C4", "C5", "C6", "L1")]}


def installed(build: dict[str, Any] | None = BUILD, torch: str = "2.15.0+cu132") -> Installed:
    return Installed(Path("/env/site-packages/horovod"), "0.28.1", build, torch)


def agrees(finding: Finding, verdict: str, says: str) -> None:
    assert finding.verdict == verdict, finding
    assert says in f"{finding.what}\n{finding.todo}", f"{says!r} is not in {finding}"
    assert bool(finding.todo) == (verdict != "ok"), "what is not ok says what to type, and only that"
