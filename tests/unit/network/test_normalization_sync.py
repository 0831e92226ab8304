"""Batch norm over the samples of all ranks is batch norm of the joined batch."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_train.network.models import Builder
from hvd_train.network.normalization import SyncBatchNorm, alone, synchronised
from hvd_train.world.world import LocalWorld
from tests.support import runs
from tests.support.runs import equal, largest_difference, small_config, trained
from tests.support.worlds import StoppingWorld, ThreadWorld, run_ranks

pytestmark = pytest.mark.numeric

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


def test_a_rank_may_pass_samples_by_itself() -> None:
    """While the other ones do nothing: nobody waits, and afterwards all take part again."""
    slope = torch.randn(12, 3, 4, 4, generator=torch.Generator().manual_seed(2))
    expected = passed(layer(), images(), slope)

    def on_rank(world: ThreadWorld) -> None:
        module = synchronised(layer(), world)
        if world.place.rank == 0:
            with alone(module):
                found = passed(module, images(), slope)
            assert all(torch.allclose(found[name], value, atol=1e-4) for name, value in expected.items())
        module(images())

    run_ranks(2, on_rank)


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


class Reshapes(nn.Module):
    """A network with batch norm whose forward pass ends on an empty batch, in more than one place."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.Conv2d(6, 9, 3, bias=False)
        self.norm, self.another, self.last = nn.BatchNorm2d(6), nn.BatchNorm2d(9), nn.BatchNorm1d(36)
        self.linear = nn.Linear(36, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits. The first layer of batch norm is used twice."""
        hidden = self.norm(self.norm(self.first(images)).tanh())
        hidden = F.interpolate(self.another(self.second(hidden)).tanh(), size=5, mode="bilinear")
        hidden = hidden.reshape(len(hidden), 3, -1).view(len(hidden), 9, 5, 5)
        hidden = F.adaptive_avg_pool2d(hidden, 2).flatten(1)
        logits: Tensor = self.linear(self.last(hidden.view(hidden.size(0), -1)))
        return logits


@pytest.mark.parametrize("make", [runs.batch_norm, Reshapes])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_training_on_ranks_is_that_of_one_with_the_joined_batch(ranks: int, make: Builder) -> None:
    """Two slots a step, and one in the last of each epoch: of two ranks one lacks a slot then, of three one always."""
    whole = small_config(batch_size=20, epochs=2, output_dir=Path("one"))
    _, expected = trained(LocalWorld(), whole, make)
    config = small_config(batch_size=10, epochs=2, sync_batch_norm=True, output_dir=Path("ranks"))
    results = run_ranks(ranks, lambda world: trained(world, config, make))
    for _, weights in results:
        assert largest_difference(weights, expected) <= 1e-5
        assert equal(weights, results[0][1])
    _, apart = trained(LocalWorld(), config.replace(output_dir=Path("apart"), sync_batch_norm=False), make)
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


def test_a_rank_that_lacks_a_slot_in_the_second_of_two_passes() -> None:
    """Five slots of 4 on three ranks are a pass over 12 samples and one over 8: two slots of one rank."""
    _, expected = trained(LocalWorld(), small_config(batch_size=12, epochs=2, output_dir=Path("one")), Reshapes)
    config = small_config(epochs=2, sync_batch_norm=True)
    results = run_ranks(3, lambda world: trained(world, config, Reshapes))
    assert all(equal(weights, results[0][1]) for _, weights in results)
    trained_ones = [
        name for name in expected if "running" not in name and "tracked" not in name
    ]  # by slot, not by pass
    first, second = ({name: found[name] for name in trained_ones} for found in (results[0][1], expected))
    assert largest_difference(first, second) <= 1e-5
