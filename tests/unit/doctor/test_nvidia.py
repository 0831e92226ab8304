"""What is said of NVIDIA's driver where torch sees no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvd_train.doctor import nvidia


class Driver:
    """libcuda as far as it is asked: `error` is what its start returns."""

    def __init__(self, version: int = 12040, count: int = 8, error: int = 0) -> None:
        self._version, self._count, self._error = version, count, error

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self._error

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = self._count
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = self._version
        return 0


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a device, with a driver in its kernel; the path of the device is returned."""
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30\n"
    )
    monkeypatch.setattr(nvidia, "_VERSION", tmp_path / "version")
    monkeypatch.setattr(nvidia, "_DEVICE", tmp_path / "nvidia0")
    return tmp_path / "nvidia0"


def test_a_driver_that_is_too_old_is_named_with_what_torch_needs() -> None:
    """Its own version, its CUDA and torch's, and the oldest driver that will do."""
    found = nvidia.unusable("13.2", lambda name: Driver())
    assert found is not None
    assert found.why == "the driver (550.54.14) is for CUDA 12.4, and torch is built for CUDA 13.2"
    assert found.todo == "install a driver for CUDA 13 (version 580 or newer), or a torch for CUDA 12"


@pytest.mark.parametrize("driver", [Driver(count=0), Driver(error=100), Driver(error=34), Driver(error=999)])
def test_no_gpu_for_this_process_is_no_fault(driver: Driver) -> None:
    """A login node has libcuda without a GPU, and a job that has asked for none may not open those of its node."""
    assert nvidia.unusable("13.2", lambda name: driver) is None


def test_a_gpu_whose_driver_does_not_start_is_told(machine: Path) -> None:
    """As after an update of the driver without a restart (error 803), or without its library in a container."""
    machine.touch()
    found = nvidia.unusable("13.2", lambda name: Driver(error=803))
    assert found is not None
    assert "does not start (CUDA error 803)" in found.why

    def missing(name: str) -> Driver:
        raise OSError(name)

    found = nvidia.unusable("12.8", missing)
    assert found is not None
    assert "has no libcuda.so.1 here" in found.why
    assert "version 525 or newer" in found.todo
    machine.unlink()
    assert nvidia.unusable("12.8", missing) is None


def test_a_driver_that_is_new_enough_is_not_called_old() -> None:
    """Torch sees no GPU for another reason then."""
    found = nvidia.unusable("12.8", lambda name: Driver(version=13000))
    assert found is not None
    assert "torch cannot use it" in found.why
