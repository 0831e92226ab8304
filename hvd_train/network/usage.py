"""What a rank takes of its machine: memory, and of a GPU how busy it is and the power that it draws."""

from __future__ import annotations

import resource
from contextlib import suppress

import psutil
import torch


def peak_memory(device: torch.device) -> dict[str, float]:
    """Return the bytes that this process held at its peak, and those that torch held on its GPU, by name."""
    found = {"peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0}  # Linux counts in KiB
    if device.type == "cuda":
        found["peak_gpu_memory"] = float(torch.cuda.max_memory_allocated(device))
    return found


def restart_peaks(device: torch.device) -> None:
    """Have `peak_memory` begin anew with what is held now; the host's peak only where Linux allows it, see proc(5)."""
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def resident_memory() -> int:
    """Return the bytes of the host's memory that this process holds now."""
    return int(psutil.Process().memory_info().rss)


def usage(device: torch.device) -> dict[str, float]:
    """Return the peaks of memory, and for a GPU that tells it `gpu_utilization` (0 to 1) and `gpu_watts`, now.

    The utilization is the share of about the last second in which the GPU had work (NVML's definition).
    """
    found = peak_memory(device)
    if device.type == "cuda":
        from pynvml import NVMLError

        with suppress(RuntimeError, NVMLError):  # not every driver answers, nor every GPU
            found["gpu_utilization"] = torch.cuda.utilization(device) / 100
            found["gpu_watts"] = torch.cuda.power_draw(device) / 1000
    return found
