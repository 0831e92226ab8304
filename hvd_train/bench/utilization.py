"""How much of what its device can do a training reaches: model FLOPs utilisation, as docs/measuring.md defines it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from hvd_train import plugin
from hvd_train.bench.record import Record, written
from hvd_train.network.device import gpu_name
from hvd_train.network.flops import Operations, fp32_format
from hvd_train.network.peaks import NumberFormat, peak_tflops
from hvd_train.world.world import World


class Countable(Protocol):
    """A training whose operations can be counted."""

    def operations(self) -> tuple[Operations, int] | None:
        """Return the operations of a pass of this rank, and its samples; None where the rank has no pass."""


Work = Mapping[str, Any]
"""The operations of one sample, forward and backward, as plain values: what `work_of` returns."""


def work_of(training: Countable, world: World) -> Work:
    """Return the operations of one sample as rank 0 counts them, on all ranks; or why they cannot be counted."""
    counted: tuple[Operations, int] | None = None
    why = ""
    try:
        counted = training.operations()  # on all ranks, which take equal numbers of batches from their loaders
    except Exception as error:  # noqa: BLE001  # a model may have what torch cannot count; it can be trained still
        why = plugin.first_line(error)
    work: Work = {"why": why}
    if counted is not None:
        operations, samples = counted
        work = {
            "per_sample": operations.total / samples,
            "fp32_format": fp32_format(operations),
            "why": ", ".join(operations.uncounted),
        }
    return world.broadcast(work, 0)


def ideal(work: Work, device: torch.device, precision: NumberFormat, peak: float | None) -> Record:
    """Return the part of a record that says what a sample takes and what the device can do.

    `peak` is the device's in 10^12 operations a second, where the user tells it.
    """
    per_sample, name = work.get("per_sample"), gpu_name(device)
    wanted: NumberFormat = work["fp32_format"] if per_sample and precision == "fp32" else precision
    known = peak_tflops(name, wanted) if name is not None else None
    return {
        "gflop_per_image": float(f"{per_sample / 1e9:.6g}") if per_sample else None,
        "not_counted": work["why"] or ("" if per_sample else "the pass has no product of matrices or convolution"),
        "peak_tflops": known if peak is None else peak,
        "peak_of": "--peak-tflops" if peak is not None else f"{wanted} on {name}" if known is not None else None,
    }


def reached(ideal: Record, images_per_second: float) -> Record:
    """Return the operations a second of a worker with this speed, and their share of the peak; None if not known."""
    gflop, peak = ideal["gflop_per_image"], ideal["peak_tflops"]
    tflops = None if gflop is None else gflop * images_per_second / 1000
    return {
        "tflops_per_worker": None if tflops is None else float(f"{tflops:.6g}"),
        "mfu": None if tflops is None or peak is None else float(f"{tflops / peak:.6g}"),
    }


def told(record: Record, unit: str) -> str:
    """Write what a record says of floating-point operations, for people."""
    gflop, tflops, missing = record["gflop_per_image"], record["tflops_per_worker"], record["not_counted"]
    if gflop is None:
        return f"not counted: {missing}"
    rate = f"{written(tflops)} TFLOP/s" if tflops >= 1 else f"{written(1000 * tflops)} GFLOP/s"
    at_least = f", without {missing}, which torch does not count" if missing else ""
    of_sample = f"{written(gflop)} GFLOP per {unit.removesuffix('s')}{at_least}; {rate} a worker"
    if record["mfu"] is None:
        return f"{of_sample}; the peak of this device is not known (--peak-tflops X)"
    return f"{of_sample}, MFU {record['mfu']:.1%} of {written(record['peak_tflops'])} TFLOP/s ({record['peak_of']})"
