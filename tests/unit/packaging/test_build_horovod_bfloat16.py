"""The bfloat16 of Horovod's patch C17 by itself, compiled alone: its numbers are those of torch."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from horovod_build.machine import find_compiler
from horovod_build.patches import SOURCE_DIR

PROGRAM = """
#include "bfloat16.h"
#include <cstdio>

using horovod::common::BFloat16;

// Reads pairs of float32, and writes each as bfloat16, and their sum and product as bfloat16.
int main() {
  float pair[2];
  while (fread(pair, sizeof(pair), 1, stdin) == 1) {
    BFloat16 a = pair[0], b = pair[1], scaled = a;
    scaled *= pair[1];
    BFloat16 all[] = {a, b, a + b, scaled};
    fwrite(all, sizeof(all), 1, stdout);
  }
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the program, compiled with warnings as errors."""
    folder = tmp_path_factory.mktemp("bfloat16")
    (folder / "program.cc").write_text(PROGRAM)
    command = [*shlex.split(find_compiler().command), "-std=c++20", "-O3", "-Wall", "-Wextra", "-Werror"]
    command += [f"-I{SOURCE_DIR / 'horovod/common'}", str(folder / "program.cc"), "-o", str(folder / "program")]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert compiled.returncode == 0, compiled.stderr
    return folder / "program"


def test_numbers_are_converted_and_combined_as_by_torch(program: Path) -> None:
    """All numbers of bfloat16, and those halfway between two and next to it: to the nearest, to the even one of two."""
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    numbers = torch.from_numpy((np.arange(2**16, dtype=np.uint32)[:, None] << 16 | lower).reshape(-1).view(np.float32))
    others = numbers[torch.randperm(len(numbers), generator=torch.Generator().manual_seed(0))]
    pairs = torch.stack([numbers, others], dim=1).numpy().tobytes()
    written = subprocess.run([program], input=pairs, capture_output=True, check=True, timeout=60).stdout
    found = torch.frombuffer(bytearray(written), dtype=torch.bfloat16).view(-1, 4)
    a, b = numbers.bfloat16(), others.bfloat16()
    for got, want in zip(found.unbind(1), (a, b, a + b, (a.float() * others).bfloat16()), strict=True):
        is_nan = want.isnan()
        assert torch.equal(got.isnan(), is_nan)
        # As bits: -0.0 is not 0.0.
        assert torch.equal(got.view(torch.int16)[~is_nan], want.view(torch.int16)[~is_nan])
