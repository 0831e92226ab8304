"""`--sync-batch-norm`: batch norm over all ranks is batch norm of the joined batch."""

from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor, nn

from hvd_train.errors import UsageError
from hvd_train.network.normalization import synchronise
from hvd_train.world.world import LocalWorld, World
from tests.support.runs import equal, largest_difference, small_config, trained
from tests.support.worlds import run_ranks

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def synchronised(norm: nn.Module, world: World) -> nn.Module:
    model = nn.Sequential(norm)
    synchronise(model, world)
    return model[0]


def layer() -> nn.BatchNorm2d:
    """Return a layer that has learnt statistics."""
    norm = nn.BatchNorm2d(3)
    norm.running_mean.copy_(torch.tensor([49.0, 50.0, 52.0]))
    return norm


@pytest.mark.parametrize("shares", [(7, 5), (6, 0, 6)])  # one rank has no sample
def test_ranks_have_the_outputs_and_statistics_of_one(shares: tuple[int, ...]) -> None:
    """Of images far from zero, whose sums of squares would lose digits."""
    images = 50 + torch.randn(12, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    alone = layer()
    outputs = alone(images).split(shares)

    def on_rank(world):
        norm = synchronised(layer(), world)
        rank = world.place.rank
        output = norm(images.split(shares)[rank])
        torch.testing.assert_close(output, outputs[rank], atol=1e-5, rtol=1e-5)
        for name in STATISTICS:
            expected = getattr(alone, name)
            torch.testing.assert_close(getattr(norm, name), expected, atol=1e-5, rtol=1e-5)

    run_ranks(len(shares), on_rank)


def test_nothing_is_divided_by_a_variance_of_zero() -> None:
    """A single sample, and values so alike that rounding makes their variance negative."""
    module = synchronised(nn.BatchNorm1d(3), LocalWorld())
    alone = torch.tensor([[1.0, 2.0, -4.0]])
    assert module(alone).tolist() == [[0.0, 0.0, 0.0]]
    alike = (1000 + torch.arange(64.0) / 7).expand(5, 64)
    module = synchronised(nn.BatchNorm1d(64), LocalWorld())
    assert bool(module(alike).isfinite().all())
    assert float(module.running_var.min()) >= 0.9 - 2**-23


def test_layers_with_more_than_batch_norm_are_refused() -> None:
    """The batch norm of many models of timm includes the activation."""
    with pytest.raises(UsageError, match=r"layer bn1 \(BatchNormAct2d\) is not batch norm alone"):
        synchronise(timm.create_model("efficientnet_b0"), LocalWorld())


class Normalises(nn.Module):
    """A network that uses a layer of batch norm twice."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.last = nn.Sequential(nn.BatchNorm1d(24), nn.Linear(24, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.pool(self.norm(self.norm(self.first(images)).tanh())))


@pytest.mark.parametrize(
    ("size", "joined"),
    [
        (10, 20),  # one rank has no micro-batch
        (4, 12),  # two passes, of 12 samples and of 8
    ],
)
def test_a_training_on_ranks_equals_one_with_the_joined_batch(size: int, joined: int) -> None:
    one = small_config(batch_size=joined, epochs=2, output_dir=Path("one"))
    _, expected = trained(LocalWorld(), one, Normalises)
    config = small_config(batch_size=size, epochs=2, sync_batch_norm=True, output_dir=Path("ranks"))

    def compared(weights):
        """Statistics move once per micro-batch."""
        skipped = STATISTICS if joined == 12 else ()
        return {name: value for name, value in weights.items() if not name.endswith(skipped)}

    results = run_ranks(3, lambda world: trained(world, config, Normalises))
    for _, weights in results:
        assert largest_difference(compared(weights), compared(expected)) <= 1e-5
        assert equal(weights, results[0][1])
    apart = config.replace(output_dir=Path("apart"), sync_batch_norm=False)
    assert largest_difference(trained(LocalWorld(), apart, Normalises)[1], expected) > 1e-3


def test_a_micro_batch_of_one_sample_is_an_error_of_use() -> None:
    with pytest.raises(UsageError, match=r"batch norm needs two samples.* --batch-size"):
        trained(LocalWorld(), small_config(batch_size=1), Normalises)
