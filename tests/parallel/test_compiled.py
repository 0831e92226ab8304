"""A compiled model on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from hvd_train.world.world import LocalWorld, World
from tests.parallel.test_equivalence import TOLERANCE
from tests.support import runs
from tests.support.device import DEVICE
from tests.support.runs import equal, largest_difference, small_config, trained


@pytest.mark.parallel
@pytest.mark.skipif(DEVICE.type == "cuda", reason="the stand-in for CUDA has no compiler")
@pytest.mark.parametrize("sync_batch_norm", [False, True])
def test_compiled_on_ranks_and_plain_on_one(
    sync_batch_norm: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a model that is compiled by block N ranks step as one with a plain model: equal weights to 1e-5."""
    if world.place.size > 2:
        pytest.skip("three ranks on two cores take long, and here they differ from two in nothing")
    torch.set_num_threads(1)
    plain: Callable[..., Any] = nn.Module.compile
    compiled: list[type[nn.Module]] = []

    def compile_quickly(module: nn.Module, **how: Any) -> None:
        compiled.append(type(module))
        plain(module, backend="aot_eager", **how)

    monkeypatch.setattr(nn.Module, "compile", compile_quickly)
    torch.compiler.reset()
    size = world.place.size
    config = small_config(batch_size=4 * size, global_batch_size=4 * size, epochs=1)
    more = {"batch_size": 4, "sync_batch_norm": True} if sync_batch_norm else {}
    _, expected = trained(LocalWorld(), config.replace(output_dir=Path("alone")), runs.residual)
    counters.clear()
    ranks = config.replace(output_dir=Path("ranks"), compile=True, **more)
    _, weights = trained(world, ranks, runs.residual)
    assert compiled == [runs.Residual, runs.Residual] * (size > 1) + [nn.Sequential] * (size == 1)
    assert counters["stats"]["unique_graphs"] > 0
    assert largest_difference(weights, expected) <= TOLERANCE
    assert all(equal(weights, other) for other in world.gather(weights)), "ranks hold different bits"
