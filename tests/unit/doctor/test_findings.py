"""Findings about Python, torch, the GPUs and the machine, from facts that a test chooses."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from hvd_train.doctor import findings
from hvd_train.doctor.children import Outcome
from hvd_train.doctor.findings import Finding
from tests.support.facts import CPU_TORCH, GB, TORCH, agrees

SMI = Outcome(0, "NVIDIA A100, 580.10\nNVIDIA A100, 580.10\n")


@pytest.mark.parametrize(
    ("finding", "verdict", "says"),
    [
        (findings.check_python((3, 11, 7), "/env"), "ok", "3.11.7"),
        (findings.check_python((3, 9, 2), "/env"), "broken", "3.10 or newer"),
        (findings.check_python((3, 14, 0), "/env"), "warning", "newer than any version tried"),
        (findings.check_hvd_train("0.1.0", Path("/src/hvd_train")), "ok", "0.1.0 in /src/hvd_train"),
        (findings.check_torch(TORCH), "ok", "CUDA 13.2"),
        (findings.check_torch(CPU_TORCH), "ok", "the CPU only"),
        (findings.check_torch({**TORCH, "version": "2.5.1"}), "warning", "torch>=2.6"),
        (findings.check_torch({"error": "ModuleNotFoundError: No module named 'torch'"}), "broken", "not installed"),
        (findings.check_torch({"error": "killed by SIGILL"}), "broken", "import torch: killed by SIGILL"),
        (findings.check_torchvision(TORCH), "ok", "0.29.2"),
        (findings.check_jpeg({"jpeg_parts": True}), "ok", "of a JPEG only the part that a crop looks at is decoded"),
        (
            findings.check_jpeg({"jpeg_parts": False}),
            "warning",
            "class folders are read at about half the speed: hvd_train was built without a C compiler, or Pillow has "
            "no libjpeg-turbo",
        ),
        (
            findings.check_torchvision(
                {"version": "2.15.0", "torchvision_error": "RuntimeError: operator torchvision::nms does not exist"}
            ),
            "broken",
            "goes with torch 2.15.0",
        ),
        (
            findings.check_torchvision(
                {"version": "2.15.0", "torchvision_error": "ModuleNotFoundError: No module named 'torchvision'"}
            ),
            "broken",
            "pip install torchvision",
        ),
        (
            findings.check_torchvision({"version": "2.15.0", "error": "no end in 60 s"}),
            "broken",
            "type the same again",
        ),
    ],
)
def test_python_and_torch(finding: Finding, verdict: str, says: str) -> None:
    """What is too old, missing or does not load is not ok; the finding says which it is."""
    agrees(finding, verdict, says)


@pytest.mark.parametrize(
    ("finding", "verdict", "says"),
    [
        (findings.check_gpus(TORCH, None, None), "ok", "training runs on the CPU"),
        (
            findings.check_gpus({**TORCH, "gpus": [["NVIDIA A100", 40 * GB]] * 2}, SMI, None),
            "ok",
            "2 x NVIDIA A100 (40 GB); driver 580.10",
        ),
        (findings.check_gpus(CPU_TORCH, SMI, None), "warning", "CUDA build of torch"),
        (findings.check_gpus({**TORCH, "gpu_warning": "driver too old"}, SMI, None), "broken", "driver too old"),
        (
            findings.check_gpus({**TORCH, "gpus_unusable": ["the driver is for CUDA 12.4", "install 580"]}, None, None),
            "broken",
            "install 580; `hvd-train train --device cpu` trains",
        ),
        (findings.check_gpus(TORCH, SMI, ""), "ok", "hidden by CUDA_VISIBLE_DEVICES"),
        (findings.check_gpus(TORCH, SMI, "7"), "broken", "CUDA_VISIBLE_DEVICES='7'"),
        (findings.check_gpus(TORCH, Outcome(9, "NVIDIA-SMI has failed: no driver"), None), "warning", "has failed"),
        (findings.check_gpus({"error": "killed by SIGSEGV"}, SMI, None), "warning", "mend torch first"),
    ],
)
def test_gpus(finding: Finding, verdict: str, says: str) -> None:
    """A machine without a GPU is ok; a GPU that torch cannot see is a fault, unless it was hidden on purpose."""
    agrees(finding, verdict, says)


@pytest.mark.parametrize(
    ("finding", "verdict", "says"),
    [
        (findings.check_shared_memory((8 * GB, 8 * GB)), "ok", "8.0 GB"),
        (findings.check_shared_memory((2**26, 2**26)), "warning", "--shm-size"),
        (findings.check_shared_memory((8 * GB, 2**20)), "warning", "what fills it"),
        (findings.check_shared_memory(None), "warning", "no /dev/shm"),
        (findings.check_open_files(1024), "ok", "1024"),
        (findings.check_open_files(256), "warning", "ulimit -n"),
        (findings.check_open_files(resource.RLIM_INFINITY), "ok", "no limit"),
        (findings.check_processors(2, None, 2), "ok", "2 cores, torch starts 2 threads"),
        (findings.check_processors(64, 2.0, 64), "warning", "--cpuset-cpus 0-1"),
        (findings.check_disk((GB * 9, GB * 5), writable=True), "ok", "5.0 GB"),
        (findings.check_disk((GB * 9, 2**20), writable=True), "warning", "1 MB free"),
        (findings.check_disk((GB * 9, GB * 5), writable=False), "warning", "--output-dir"),
        (findings.check_disk(None, writable=True), "warning", "--output-dir"),
    ],
)
def test_machine(finding: Finding, verdict: str, says: str) -> None:
    """Limits that make training slow, or break it off after hours, come with what to type."""
    agrees(finding, verdict, says)


@pytest.mark.parametrize(("text", "quota"), [("150000 100000\n", 1.5), ("max 100000\n", None), ("", None)])
def test_cpu_quota(tmp_path: Path, text: str, quota: float | None) -> None:
    """A control group allows some time per period, or has no limit."""
    path = tmp_path / "cpu.max"
    path.write_text(text)
    assert findings.cpu_quota(path) == quota
    assert findings.cpu_quota(tmp_path / "absent") is None
