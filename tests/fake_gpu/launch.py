"""Starts commands whose torch, Horovod and NCCL are those of the stand-in."""

import os
from pathlib import Path

from tests.fake_gpu.build import LIBRARY

SITE = Path(__file__).parent / "site"
ROOT = Path(__file__).parents[2]


class OnGpu:
    """Runs commands on the stand-in in a test's folder, and keeps what it has reported."""

    def __init__(self, libraries: Path, folder: Path) -> None:
        self.folder = folder
        self._libraries = libraries
        self._report = folder / "fake_gpu.txt"

    def variables(self, **settings: object) -> dict[str, str]:
        """Return the variables under which torch, Horovod and hvd-train run on the stand-in.

        `settings` are variables of README.md in small letters without their prefix (`seed=3`).
        Torch's own cache is off, so that each tensor has memory of its own and its end is seen.
        """
        return {
            "LD_PRELOAD": _before("LD_PRELOAD", self._libraries / LIBRARY),
            "LD_LIBRARY_PATH": _before("LD_LIBRARY_PATH", self._libraries),
            "PYTHONPATH": _before("PYTHONPATH", SITE, ROOT),
            "CUDA_VISIBLE_DEVICES": "0,1,2,3",
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
            "FAKE_GPU_REPORT": str(self._report),
            **{f"FAKE_GPU_{name.upper()}": str(value) for name, value in settings.items()},
        }

    def mistakes(self) -> list[str]:
        """Return the mistakes that the stand-in has seen since the last call."""
        lines = self._report.read_text().splitlines() if self._report.exists() else []
        self._report.unlink(missing_ok=True)
        return lines


def _before(variable: str, *paths: Path) -> str:
    """Return the value of a list of paths with these put before what it has."""
    return os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get(variable)])])
