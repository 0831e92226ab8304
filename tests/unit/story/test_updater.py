"""One optimizer step, against plain torch."""

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hvd_train import Config
from hvd_train.errors import UsageError
from hvd_train.network.device import LossScaler
from hvd_train.progress.order import Batch, BatchLayout, MicroBatch
from hvd_train.state import Answer, TrainState
from hvd_train.updater import Updater
from hvd_train.world.world import Gradients, LocalWorld, World
from tests.support import runs
from tests.support.runs import largest_difference
from tests.support.worlds import own_generator

CPU = torch.device("cpu")

INPUTS = torch.cos(torch.arange(8 * 64.0).view(8, 1, 8, 8))
TARGETS = torch.arange(8)


def take(
    model: nn.Module,
    micro: int = 4,
    scale: float | None = None,
    world: World | None = None,
    **settings: Any,
) -> Answer:
    """Take a step of eight samples in micro-batches of this size."""
    parts = zip(INPUTS.split(micro), TARGETS.split(micro), strict=True)
    micros = [MicroBatch(n, np.arange(len(part[1])), part) for n, part in enumerate(parts)]
    scaler = LossScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainState(model, {"": optimizer}, scaler, BatchLayout(8, 4))
    config = Config().replace(**settings)
    updater = Updater(config, world or LocalWorld(), model, CPU, {"": runs.TRAINING})
    return updater.take(state, Batch(8, len(micros), tuple(micros)))


@pytest.mark.parametrize(
    ("micro", "clip", "scale"),
    [(3, None, None), (3, 0.1, None), (8, 0.1, 65536.0)],
)
def test_a_step_equals_plain_torch(micro: int, clip: float | None, scale: float | None) -> None:
    """Accumulated, clipped and scaled."""
    model, by_hand = (own_generator(runs.convnet(10)) for _ in range(2))
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    F.cross_entropy(by_hand(INPUTS), TARGETS).backward()
    norm = nn.utils.clip_grad_norm_(by_hand.parameters(), clip or float("inf"))
    optimizer.step()
    result = take(model, micro, scale, clip_norm=clip)
    assert largest_difference(model.state_dict(), by_hand.state_dict()) <= 1e-6
    assert result.gradient_norm == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            "4 .*: type --batch-size 2 --accumulation-steps 4",
        ),
        (
            RuntimeError("pool_cuda does not have a deterministic implementation"),
            "pool_cuda has no deterministic version: leave out",
        ),
    ],
)
def test_what_the_settings_ask_too_much_is_one_line(error: Exception, says: str) -> None:
    model = own_generator(runs.convnet(10))
    model.register_forward_pre_hook(Mock(side_effect=error))
    with pytest.raises(UsageError, match=says):
        take(model)


class KnowsSquares(LocalWorld):
    """A world whose reduction has added up the squares, with a rounding of its own."""

    def reduce(self) -> Gradients:
        gradients = super().reduce()
        squares = sum(float(each.double().square().sum()) for each in gradients.tensors)
        return Gradients(gradients.tensors, squares * (1 + 2**-20))


def test_clipping_rounds_the_same_whether_the_reduction_knows_the_squares() -> None:
    """It does so from the second update of a process on, so a resumed run would differ."""
    weights = []
    for world in (LocalWorld(), KnowsSquares()):
        model = own_generator(runs.convnet(10))
        take(model, world=world, clip_norm=0.01)
        weights.append(model.state_dict())
    assert runs.equal(*weights)


@pytest.mark.parametrize(
    ("precision", "dtype", "scale"),
    [("bf16", torch.bfloat16, None), ("fp16", torch.float16, 128.0)],
)
def test_mixed_precision_keeps_weights_in_fp32(
    precision: str, dtype: torch.dtype, scale: float | None
) -> None:
    model = own_generator(runs.batch_norm(10))
    seen = set()
    model[0].register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    take(model, scale=scale, precision=precision)
    assert seen == {dtype}
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in model.parameters())
