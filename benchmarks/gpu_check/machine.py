"""Which GPUs there are, and how many ranks they take. Nothing here uses a GPU itself: a child process looks."""

from __future__ import annotations

import dataclasses
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_train.doctor import questions
from hvd_train.doctor.children import Children
from hvd_train.doctor.findings import version_numbers
from hvd_train.errors import UsageError
from hvd_train.launch import hosts

SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "4"}
SHARES_SINCE = (2, 30)  # of NCCL
MOST_ON_ONE = 4  # ranks that share a GPU


@dataclass(frozen=True)
class Machine:
    """The GPUs of this machine, or of the hosts of a file."""

    gpus: tuple[str, ...]
    """Names of those here."""
    gpu_bytes: int
    """The memory of the first one."""
    torch: str
    nccl: str
    host_file: Path | None = None
    slots: int = 0
    """Of all hosts of the file."""

    @property
    def is_stand_in(self) -> bool:
        """Whether the GPUs are those of tests/fake_gpu: its numbers are right, its speed means nothing."""
        return self.gpus[0].startswith("Fake GPU")

    @property
    def shares_gpu(self) -> bool:
        """Whether several ranks share the one GPU."""
        return self.host_file is None and len(self.gpus) == 1 and version_numbers(self.nccl) >= SHARES_SINCE

    @property
    def most_ranks(self) -> int:
        """The greatest number of ranks that can be started."""
        return self.slots if self.host_file else MOST_ON_ONE if self.shares_gpu else len(self.gpus)

    @property
    def variables(self) -> dict[str, str]:
        """What the environment of ranks needs."""
        return SHARED_GPU if self.shares_gpu else {}

    @property
    def about_ranks(self) -> str:
        """How many ranks there can be, and why, in a sentence."""
        if self.host_file:
            return f"{self.slots} ranks on the hosts of {self.host_file}"
        if self.shares_gpu:
            return f"up to {MOST_ON_ONE} ranks share the GPU (NCCL {self.nccl})"
        if len(self.gpus) == 1:
            return f"one rank: NCCL {self.nccl} lets no ranks share a GPU, 2.30 does"
        return f"up to {len(self.gpus)} ranks, a GPU for each"

    def as_dict(self) -> dict[str, Any]:
        """Return all of this as plain values for the record."""
        values = {**dataclasses.asdict(self), "host_file": str(self.host_file or "")}
        stand_in = {"stand-in": "no GPU: numbers are right, speeds mean nothing"} if self.is_stand_in else {}
        return {**values, "cores": len(os.sched_getaffinity(0)), "ranks": self.about_ranks, **stand_in}


def examine(group: Children, host_file: Path | None) -> Machine:
    """Look at the GPUs here, and at the host file. Raises UsageError where there is no GPU, or the file is wrong."""
    listed = hosts.read(host_file) if host_file else ()
    torch = questions.answer(group.start([sys.executable, "-c", questions.TORCH], 120).outcome())
    if not torch.get("gpus"):
        raise UsageError("torch sees no GPU here, and this check is of GPUs: `hvd-train doctor` says why there is none")
    names = tuple(name for name, _ in torch["gpus"])
    slots = sum(host.slots for host in listed)
    gpu_bytes, nccl = torch["gpus"][0][1], torch["nccl"] or "none"
    return Machine(names, gpu_bytes, torch["version"], nccl, host_file and host_file.resolve(), slots)
