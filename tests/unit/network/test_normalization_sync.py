"""Batch norm over the samples of all ranks is batch norm of the joined batch."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hvd_train.network.normalization import SyncBatchNorm, synchronised
from hvd_train.world.world import LocalWorld
from tests.support import runs
from tests.support.runs import equal, largest_difference, small_config, trained
from tests.support.worlds import StoppingWorld, ThreadWorld, run_ranks

SHARES = {2: (7, 5), 3: (6, 0, 6)}  # one rank has no sample


def images(count: int = 12) -> Tensor:
    """Far from centred, which is where sums of squares would lose digits."""
    return 50 + torch.randn(count, 3, 4, 4, generator=torch.Generator().manual_seed(1))


def layer() -> nn.BatchNorm2d:
    """With weights and statistics that are not the first ones."""
    made = nn.BatchNorm2d(3)
    with torch.no_grad():
        made.weight.copy_(torch.tensor([0.5, -1.0, 2.0]))
        made.bias.copy_(torch.tensor([0.1, 0.2, -0.3]))
    made.running_mean = torch.tensor([49.0, 50.0, 52.0])
    return made


def passed(module: nn.Module, part: Tensor, slope: Tensor) -> dict[str, Tensor]:
    """All that a forward and a backward pass give."""
    part = part.clone().requires_grad_()
    output = module(part)
    (output * slope).sum().backward()
    assert part.grad is not None
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {"output": output.detach(), "images": part.grad, **gradients, **dict(module.named_buffers())}


@pytest.mark.parametrize("ranks", SHARES)
def test_outputs_gradients_and_statistics(ranks: int) -> None:
    """Those of plain batch norm on one rank with all samples, to 1e-5, whoever has how many of them."""
    slope = torch.randn(12, 3, 4, 4, generator=torch.Generator().manual_seed(2))
    expected = passed(layer(), images(), slope)

    def on_rank(world: ThreadWorld) -> dict[str, Tensor]:
        module = synchronised(layer(), world)
        assert isinstance(module, SyncBatchNorm)
        mine = [part.split(SHARES[ranks])[world.place.rank] for part in (images(), slope)]
        return passed(module, *mine)

    found = run_ranks(ranks, on_rank)
    for name in ("output", "images"):
        torch.testing.assert_close(torch.cat([f[name] for f in found]), expected[name], atol=1e-5, rtol=1e-5)
    for name in ("weight", "bias"):
        torch.testing.assert_close(sum(f[name] for f in found), expected[name], atol=1e-4, rtol=1e-5)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        for of_rank in found:
            torch.testing.assert_close(of_rank[name], expected[name], atol=1e-5, rtol=1e-5)


def test_the_gradient_is_that_of_the_function() -> None:
    """Against differences, in float64, on one rank."""
    module = synchronised(nn.BatchNorm1d(3, dtype=torch.float64), LocalWorld())
    values = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True)
    assert torch.autograd.gradcheck(module, (values,), eps=1e-3, atol=1e-3)


def test_in_evaluation_it_is_the_plain_one() -> None:
    """Bit for bit; and a checkpoint of either loads into the other."""
    plain = layer().eval()
    module = synchronised(copy.deepcopy(plain), LocalWorld())
    assert torch.equal(module(images()), plain(images()))
    assert module.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(module.state_dict())


def test_a_training_on_ranks_is_that_of_one_with_the_joined_batch() -> None:
    """10 epochs' worth of steps, the last of each with a rank that has no sample."""
    whole = small_config(batch_size=20, epochs=3, output_dir=Path("one"))
    _, expected = trained(LocalWorld(), whole, runs.batch_norm)
    config = small_config(batch_size=10, epochs=3, sync_batch_norm=True, output_dir=Path("two"))
    results = run_ranks(2, lambda world: trained(world, config, runs.batch_norm))
    for _, weights in results:
        assert largest_difference(weights, expected) <= 1e-5
    _, apart = trained(LocalWorld(), config.replace(output_dir=Path("apart"), sync_batch_norm=False), runs.batch_norm)
    assert largest_difference(apart, expected) > 1e-3, "it would be the same without"


def test_stopped_and_resumed() -> None:
    """Bit-identical, with a moving average beside."""
    config = small_config(batch_size=10, epochs=2, sync_batch_norm=True, ema_decay=0.9)
    _, expected = trained(LocalWorld(), config.replace(output_dir=Path("whole")), runs.batch_norm)
    trained(StoppingWorld(7), config, runs.batch_norm)
    _, weights = trained(LocalWorld(), config, runs.batch_norm)
    assert equal(weights, expected)


@pytest.mark.parametrize("momentum", [0.3, None])
def test_statistics_move_by_the_momentum_of_the_layer(momentum: float | None) -> None:
    """None is the plain mean over all batches, as torch has it."""
    plain = nn.BatchNorm2d(3, momentum=momentum)
    module = synchronised(nn.BatchNorm2d(3, momentum=momentum), LocalWorld())
    for number in range(3):
        part = images() - 50 + number
        plain(part), module(part)
    for name, expected in plain.named_buffers():
        torch.testing.assert_close(dict(module.named_buffers())[name], expected, atol=1e-5, rtol=1e-5)
