"""What a rank takes of its machine."""

from __future__ import annotations

import psutil
import pytest
import torch
from pynvml import NVMLError_NotSupported

from hvd_train.network.usage import peak_memory, resident_memory, restart_peaks, usage

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_the_peak_of_this_process() -> None:
    """In bytes: at least what it holds now, and less than the machine has."""
    held = psutil.Process().memory_info().rss
    assert held * 0.9 < peak_memory(CPU)["peak_memory"] < psutil.virtual_memory().total
    assert usage(CPU).keys() == {"peak_memory"}


def test_a_gpu_says_how_busy_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its driver answers; NVML has percent and milliwatts."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**30)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 75)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 350_000)
    found = usage(GPU)
    assert (found["peak_gpu_memory"], found["gpu_utilization"], found["gpu_watts"]) == (2**30, 0.75, 350)


@pytest.mark.parametrize("error", [NVMLError_NotSupported(), RuntimeError("NVML driver is not loaded")])
def test_a_gpu_that_says_nothing(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is torch's own, and the rest is left out."""

    def fails(device: torch.device) -> int:
        raise error

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**30)
    monkeypatch.setattr(torch.cuda, "utilization", fails)
    assert usage(GPU).keys() == {"peak_memory", "peak_gpu_memory"}


def test_peaks_begin_anew() -> None:
    """What was freed before is not in them, where the system allows it; what comes later is."""
    first = torch.ones(30_000_000)
    peak = peak_memory(CPU)["peak_memory"]
    del first
    restart_peaks(CPU)
    assert resident_memory() * 0.95 <= peak_memory(CPU)["peak_memory"] <= peak
    second = torch.ones(60_000_000)
    assert peak_memory(CPU)["peak_memory"] >= second.nbytes + 100_000_000
