"""The environment in which a command has the stand-in's GPUs."""

from __future__ import annotations

import os
from pathlib import Path

from tests.fake_gpu.build import FakeGpu

SITE = Path(__file__).parent / "site"
ROOT = Path(__file__).parents[2]


def environment(
    gpu: FakeGpu,
    *,
    report: Path,
    seed: int = 0,
    devices: int = 4,
    faults: str = "",
    **settings: object,
) -> dict[str, str]:
    """Return the variables under which torch, Horovod and hvd-train run on the stand-in.

    `report` is the file that gets a line for each mistake which the stand-in sees, such as a race. `seed` decides when
    streams are late, `faults` orders errors as README.md has it, and `settings` are variables of the stand-in in small
    letters without their prefix (`memory=10**8`).
    """
    paths = [str(SITE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    libraries = [str(gpu.folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    preloaded = [str(gpu.library), *filter(None, [os.environ.get("LD_PRELOAD")])]
    numbers = {"SEED": seed, "DEVICES": devices, **{name.upper(): value for name, value in settings.items()}}
    return {
        "LD_PRELOAD": ":".join(preloaded),
        "LD_LIBRARY_PATH": ":".join(libraries),
        "PYTHONPATH": os.pathsep.join(paths),
        # Each tensor has memory of its own, so that its end is seen.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "FAKE_GPU_REPORT": str(report),
        **({"FAKE_GPU_FAULTS": faults} if faults else {}),
        **{f"FAKE_GPU_{name}": str(value) for name, value in numbers.items()},
    }


def told(report: Path) -> list[str]:
    """Return the mistakes that the stand-in has seen."""
    return report.read_text().splitlines() if report.exists() else []
