"""The table of what GPUs can do at most."""

from __future__ import annotations

import pytest

from hvd_train.network.peaks import NumberFormat, peak_tflops


@pytest.mark.parametrize(
    ("gpu", "number_format", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "fp16", 756.0),
        ("NVIDIA H200", "tf32", 494.7),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312.0),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156.0),
        ("NVIDIA A100-PCIE-40GB", "fp32", 19.5),
        ("NVIDIA A100 80GB PCIe", "fp16", 312.0),
        ("A100-SXM4-40GB", "bf16", 312.0),
        ("Tesla V100-SXM2-32GB", "fp16", 125.0),
        ("Tesla V100-SXM2-32GB", "tf32", 15.7),
        ("Tesla V100-PCIE-16GB", "fp16", 112.0),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA A10", "tf32", 62.5),
        ("Tesla T4", "fp16", 65.0),
        ("NVIDIA GeForce RTX 3090", "bf16", 71.0),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
    ],
)
def test_a_gpu_has_the_dense_peak_of_its_data_sheet(gpu: str, number_format: NumberFormat, peak: float) -> None:
    """By the name that its driver gives; without TF32 it computes in fp32."""
    assert peak_tflops(gpu, number_format) == peak


@pytest.mark.parametrize(
    ("gpu", "number_format"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16"),
        ("NVIDIA A100-SXM-64GB", "bf16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("NVIDIA GeForce RTX 4090 D", "bf16"),
        ("NVIDIA A10G", "bf16"),
        ("Tesla V100-SXM2-32GB", "bf16"),
        ("Tesla T4", "bf16"),
        ("Fake GPU 0", "fp32"),
        ("", "fp32"),
    ],
)
def test_a_peak_that_is_not_known_is_not_guessed(gpu: str, number_format: NumberFormat) -> None:
    """Of a part of a GPU, of one with fewer units, of a format that it does not have."""
    assert peak_tflops(gpu, number_format) is None
