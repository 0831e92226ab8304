"""Programs with loops of their own on the stand-in for CUDA and NCCL end with the weights that they have on CPUs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.fake_gpu.launch import OnGpu
from tests.support.launching import finished, launch_line
from tests.support.runs import equal

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PROGRAM = """
from tests.support import own_loops
own_loops.{name}(None, device="{device}", output_dir="{device}", epochs=1)
"""


@pytest.mark.parametrize("name", ["classify", "generate"])
def test_weights_are_those_of_cpus(gpu: OnGpu, name: str) -> None:
    """To the bit, on two ranks: one optimizer with evaluations, and two with a turn each."""
    for device in ("cpu", "cuda"):
        (gpu.folder / "program.py").write_text(PROGRAM.format(name=name, device=device))
        line = launch_line("gloo", 2, sys.executable, "program.py")
        root = {"PYTHONPATH": str(Path(__file__).parents[3])}
        # A program's process ends in Python's own way: torch without its cache cannot free memory as late as that.
        variables = gpu.variables(devices=2, caching=True) if device == "cuda" else root
        code, output = finished(line, gpu.folder, variables=variables)
        assert code == 0, output
        assert f"2 ranks on {device}" in output
    cpu, cuda = (
        torch.load(gpu.folder / device / "model-final.pt", map_location="cpu", weights_only=True)
        for device in ("cpu", "cuda")
    )
    assert equal(cpu, cuda)
