"""What a rank takes of its host: memory and processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from hvd_train import Config
from hvd_train.network.device import choose_device
from hvd_train.world.world import LocalWorld

choose_device(Config().replace(device="cpu"), LocalWorld().place)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(40):
    torch.ones(25_000_000)  # 100 MB, freed at once
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize(("said", "kept"), [({}, True), ({"MALLOC_MMAP_THRESHOLD_": "1000000"}, False)])
def test_freed_memory_is_kept_for_the_next_step(said: dict[str, str], kept: bool) -> None:
    """Large tensors take the places of those before them without a fault for each page, unless told otherwise."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env={**environment, **said}, capture_output=True, text=True, check=True)
    pages = 25_000_000 * 4 // os.sysconf("SC_PAGE_SIZE")
    assert (int(done.stdout) < 20 * pages) is kept, "of forty; some find their place only after a few"
