"""Starts commands whose torch, Horovod and NCCL are those of the stand-in."""

import os
import sys
from pathlib import Path

from tests.fake_gpu.build import LIBRARY

SITE = Path(__file__).parent / "site"
ROOT = Path(__file__).parents[2]


def environment(
    libraries: Path,
    *,
    report: Path,
    seed: int = 0,
    devices: int = 4,
    faults: str = "",
    caching: bool = False,
    **settings: object,
) -> dict[str, str]:
    """Return the variables under which torch, Horovod and hvd-train run on the stand-in.

    `report` is the file that gets a line for each mistake which the stand-in sees, such as a race. `seed` decides when
    streams are late, `faults` orders errors as README.md has it, and `settings` are variables of the stand-in in small
    letters without their prefix (`memory=10**8`). Without `caching` by torch each tensor has memory of its own, so that
    its end is seen.
    """
    numbers = {"SEED": seed, "DEVICES": devices, **{name.upper(): value for name, value in settings.items()}}
    return {
        "LD_PRELOAD": _before("LD_PRELOAD", libraries / LIBRARY),
        "LD_LIBRARY_PATH": _before("LD_LIBRARY_PATH", libraries),
        "PYTHONPATH": _before("PYTHONPATH", SITE, ROOT),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(devices))),
        **({} if caching else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
        "FAKE_GPU_REPORT": str(report),
        "FAKE_GPU_FAULTS": faults,
        **{f"FAKE_GPU_{name}": str(value) for name, value in numbers.items()},
    }


def _before(variable: str, *paths: Path) -> str:
    """Return the value of a list of paths with these put before what it has."""
    return os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get(variable)])])


class OnGpu:
    """Runs commands on the stand-in in a test's folder, and keeps what it has told of them."""

    def __init__(self, libraries: Path, folder: Path) -> None:
        self.folder = folder
        self._libraries = libraries
        self._report = folder / "fake_gpu.txt"

    def variables(self, **settings: object) -> dict[str, str]:
        return environment(self._libraries, report=self._report, **settings)  # type: ignore[arg-type]

    def play(self, name: str, *arguments: str, of: str = "plays") -> list[str]:
        """Return the command that runs a play of tests/fake_gpu/plays.py or torch_plays.py."""
        return [sys.executable, "-m", f"tests.fake_gpu.{of}", name, *arguments]

    def mistakes(self) -> list[str]:
        """Return the mistakes that the stand-in has seen since this was last called."""
        lines = self._report.read_text().splitlines() if self._report.exists() else []
        self._report.unlink(missing_ok=True)
        return lines
