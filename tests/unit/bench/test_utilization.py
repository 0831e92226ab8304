"""Model FLOPs utilisation: what is reached, of what is known."""

from __future__ import annotations

import pytest
import torch

from hvd_train.bench import utilization
from hvd_train.bench.utilization import ideal, reached, told, work_of
from hvd_train.network.flops import Operations
from hvd_train.world.world import LocalWorld

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Counted:
    """A training of 2 GFLOP per sample in passes of four, or one that cannot be counted."""

    def __init__(self, error: str = "", uncounted: tuple[str, ...] = ()) -> None:
        self._error, self._uncounted = error, uncounted

    def operations(self) -> tuple[Operations, int] | None:
        """Return them, or raise what a model may raise."""
        if self._error:
            raise NotImplementedError(self._error)
        return Operations(8 * 10**9, 0, self._uncounted), 4


def test_the_share_of_a_known_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of 2 GFLOP, 78,000 times a second, on a GPU of 312 TFLOP/s: a half."""
    monkeypatch.setattr(utilization, "gpu_name", lambda device: "NVIDIA A100-SXM4-40GB")
    found = ideal(work_of(Counted(), LocalWorld()), GPU, "bf16", None)
    assert (found["gflop_per_image"], found["peak_tflops"]) == (2.0, 312.0)
    assert found["peak_of"] == "bf16 on NVIDIA A100-SXM4-40GB"
    assert reached(found, 78_000.0) == {"tflops_per_worker": 156.0, "mfu": 0.5}
    assert told({**found, **reached(found, 78_000.0)}, "images") == (
        "2.00 GFLOP per image; 156 TFLOP/s a worker, MFU 50.0% of 312 TFLOP/s (bf16 on NVIDIA A100-SXM4-40GB)"
    )


def test_without_a_peak_there_is_no_share() -> None:
    """A CPU has none in the table, and the line says how to tell it; a peak that is told counts."""
    work = work_of(Counted(), LocalWorld())
    found = ideal(work, CPU, "fp32", None)
    assert reached(found, 10.0) == {"tflops_per_worker": 0.02, "mfu": None}
    line = told({**found, **reached(found, 10.0)}, "samples")
    assert (
        line == "2.00 GFLOP per sample; 20.0 GFLOP/s a worker; the peak of this device is not known (--peak-tflops X)"
    )
    assert reached(ideal(work, CPU, "fp32", 0.1), 10.0)["mfu"] == 0.2


def test_what_cannot_be_counted_is_told() -> None:
    """The bench goes on without the number."""
    found = ideal(work_of(Counted("no such operator"), LocalWorld()), CPU, "fp32", 1.0)
    line = told({**found, **reached(found, 10.0)}, "images")
    assert line.startswith("not counted: NotImplementedError: no such operator")


def test_what_is_not_in_the_count_is_told() -> None:
    """So nobody takes it for all of the work."""
    found = ideal(work_of(Counted(uncounted=("aten::_cudnn_rnn",)), LocalWorld()), CPU, "fp32", None)
    assert "without aten::_cudnn_rnn, which torch does not count" in told({**found, **reached(found, 1.0)}, "images")
