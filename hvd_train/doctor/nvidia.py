"""What the NVIDIA driver of this machine says where torch sees no GPU: that there is none, or why it cannot be used."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DEVICE, _VERSION = Path("/dev/nvidia0"), Path("/proc/driver/nvidia/version")
_NO_GPU = (34, 100)  # CUDA_ERROR_STUB_LIBRARY and CUDA_ERROR_NO_DEVICE: not there, or not for this process
# The oldest driver for each CUDA, whatever its minor version (CUDA Compatibility, "minor version compatibility").
_OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}


@dataclass(frozen=True)
class Unusable:
    """Why a GPU that is there cannot be used."""

    why: str
    todo: str


def unusable(cuda: str, load: Callable[[str], Any] = ctypes.CDLL) -> Unusable | None:
    """Return why a torch that is built for this CUDA sees no GPU, or None where there is none for this process.

    GPUs that CUDA_VISIBLE_DEVICES or a job's control group hides count as not there. `load` opens a library.
    """
    major = int(cuda.split(".")[0])
    oldest = _OLDEST_DRIVERS.get(major)
    needed = f"a driver for CUDA {major}" + (f" (version {oldest} or newer)" if oldest else "")
    kind = "the driver" if (version := driver_version()) is None else f"the driver ({version})"
    try:
        driver = load("libcuda.so.1")
    except OSError:
        if not _can_open(_DEVICE):
            return None
        todo = f"install {needed}, or in a container start it with the NVIDIA Container Toolkit (docker run --gpus all)"
        return Unusable(f"there is {_DEVICE}, but {kind} has no libcuda.so.1 here", todo)
    number, count = ctypes.c_int(), ctypes.c_int()
    error = int(driver.cuInit(0))
    if error in _NO_GPU or (error and not _can_open(_DEVICE)):
        return None
    if error:
        return Unusable(
            f"{kind} does not start (CUDA error {error})", f"see what nvidia-smi says; torch needs {needed}"
        )
    if int(driver.cuDeviceGetCount(ctypes.byref(count))) or count.value == 0:
        return None
    driver.cuDriverGetVersion(ctypes.byref(number))
    own = f"{number.value // 1000}.{number.value % 1000 // 10}"
    if number.value // 1000 >= major:
        return Unusable(f"{kind} has {count.value}, but torch cannot use it", "see what nvidia-smi and dmesg say")
    todo = f"install {needed}, or a torch for CUDA {number.value // 1000}"
    return Unusable(f"{kind} is for CUDA {own}, and torch is built for CUDA {cuda}", todo)


def driver_version() -> str | None:
    """Return the version of the driver in the kernel, such as 550.54.14; None where there is none."""
    with suppress(OSError):
        if match := re.search(r"\b\d+\.\d+(\.\d+)?\b", _VERSION.read_text(encoding="utf-8", errors="replace")):
            return match.group()
    return None


def _can_open(path: Path) -> bool:
    """Return whether a device is there for this process: what Slurm has not given to a job may be seen, not opened."""
    with suppress(OSError):
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        return True
    return False
