"""How many floating-point operations a second GPUs can do at most, from NVIDIA's data sheets. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

NumberFormat = Literal["fp32", "tf32", "fp16", "bf16"]

_H100_SXM: Mapping[NumberFormat, float] = {"fp32": 67.0, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4}
_H100_NVL: Mapping[NumberFormat, float] = {"fp32": 60.0, "tf32": 417.5, "fp16": 835.5, "bf16": 835.5}
# TFLOP/s of dense matrices: data sheets that give those of sparse ones ("with sparsity") have twice as many. fp16 and
# bf16 with sums in fp32, which are what torch computes. Names are those that the driver gives; a name that is not
# matched as a whole, such as that of a part of a divided GPU (MIG), of a cut-down one or of a laptop's, has no peak.
_PEAKS: Mapping[str, Mapping[NumberFormat, float]] = {
    # "NVIDIA H100 Tensor Core GPU" and "NVIDIA H200 Tensor Core GPU", data sheets; H100 white paper, table 2
    r"NVIDIA H100 80GB HBM3": _H100_SXM,
    r"NVIDIA H100 PCIe": {"fp32": 51.2, "tf32": 378.0, "fp16": 756.0, "bf16": 756.0},
    r"NVIDIA H100 NVL": _H100_NVL,
    r"NVIDIA H200": _H100_SXM,
    r"NVIDIA H200 NVL": _H100_NVL,
    # "NVIDIA A100 Tensor Core GPU", data sheet: the same for PCIe and SXM
    r"(NVIDIA )?A100[- ](SXM4-|PCIE-)?(40|80)GB( PCIe)?": {"fp32": 19.5, "tf32": 156.0, "fp16": 312.0, "bf16": 312.0},
    # "NVIDIA A30 Tensor Core GPU", "NVIDIA A40" and "NVIDIA A10", data sheets
    r"NVIDIA A30": {"fp32": 10.3, "tf32": 82.0, "fp16": 165.0, "bf16": 165.0},
    r"NVIDIA A40": {"fp32": 37.4, "tf32": 74.8, "fp16": 149.7, "bf16": 149.7},
    r"NVIDIA A10": {"fp32": 31.2, "tf32": 62.5, "fp16": 125.0, "bf16": 125.0},
    # "NVIDIA L4 Tensor Core GPU", "NVIDIA L40" and "NVIDIA L40S", data sheets
    r"NVIDIA L4": {"fp32": 30.3, "tf32": 60.0, "fp16": 121.0, "bf16": 121.0},
    r"NVIDIA L40": {"fp32": 90.5, "tf32": 90.5, "fp16": 181.05, "bf16": 181.05},
    r"NVIDIA L40S": {"fp32": 91.6, "tf32": 183.0, "fp16": 362.05, "bf16": 362.05},
    # "NVIDIA V100 Tensor Core GPU" and "NVIDIA T4 Tensor Core GPU", data sheets: these have neither TF32 nor bf16
    r"Tesla V100-SXM2-(16|32)GB": {"fp32": 15.7, "fp16": 125.0},
    r"Tesla V100-PCIE-(16|32)GB": {"fp32": 14.0, "fp16": 112.0},
    r"Tesla V100S-PCIE-32GB": {"fp32": 16.4, "fp16": 130.0},
    r"(Tesla|NVIDIA) T4": {"fp32": 8.1, "fp16": 65.0},
    # "NVIDIA Ampere GA102 GPU Architecture" and "NVIDIA Ada GPU Architecture", white papers, tables in appendix A
    r"NVIDIA GeForce RTX 3090": {"fp32": 35.6, "tf32": 35.6, "fp16": 71.0, "bf16": 71.0},
    r"NVIDIA GeForce RTX 4090": {"fp32": 82.6, "tf32": 82.6, "fp16": 165.2, "bf16": 165.2},
}


def peak_tflops(gpu: str, number_format: NumberFormat) -> float | None:
    """Return the peak of a GPU by the driver's name for it, in 10^12 operations a second; None where it is not known.

    Where a GPU has no TF32, torch computes in fp32 what may be computed in it.
    """
    peaks = next((peaks for name, peaks in _PEAKS.items() if re.fullmatch(name, gpu)), {})
    return peaks.get(number_format, peaks.get("fp32") if number_format == "tf32" else None)
