"""`--sync-batch-norm`: batch norm over all ranks is batch norm of the joined batch."""

from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_train.errors import UsageError
from hvd_train.network.normalization import synchronise
from hvd_train.world.world import LocalWorld, World
from tests.support.runs import equal, largest_difference, small_config, trained
from tests.support.worlds import ThreadWorld, run_ranks

SHARES = {2: (7, 5), 3: (6, 0, 6)}  # one rank has no sample


def images(count: int = 12) -> Tensor:
    """Return images far from zero, so that sums of squares would lose digits."""
    return 50 + torch.randn(count, 3, 4, 4, generator=torch.Generator().manual_seed(1))


def layer() -> nn.BatchNorm2d:
    made = nn.BatchNorm2d(3)
    with torch.no_grad():
        made.weight.copy_(torch.tensor([0.5, -1.0, 2.0]))
        made.bias.copy_(torch.tensor([0.1, 0.2, -0.3]))
    made.running_mean = torch.tensor([49.0, 50.0, 52.0])
    return made


def synchronised(norm: nn.Module, world: World) -> nn.Module:
    model = nn.Sequential(norm)
    synchronise(model, world)
    return model[0]


def passed(module: nn.Module, part: Tensor, slope: Tensor) -> dict[str, Tensor]:
    part = part.clone().requires_grad_()
    output = module(part)
    (output * slope).sum().backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {
        "output": output.detach(),
        "images": part.grad,
        **gradients,
        **dict(module.named_buffers()),
    }


@pytest.mark.parametrize("ranks", SHARES)
def test_outputs_gradients_and_statistics_equal_one_rank(ranks: int) -> None:
    slope = torch.randn(12, 3, 4, 4, generator=torch.Generator().manual_seed(2))
    expected = passed(layer(), images(), slope)

    def on_rank(world: ThreadWorld) -> dict[str, Tensor]:
        module = synchronised(layer(), world)
        mine = [part.split(SHARES[ranks])[world.place.rank] for part in (images(), slope)]
        return passed(module, *mine)

    found = run_ranks(ranks, on_rank)
    for name in ("output", "images"):
        torch.testing.assert_close(
            torch.cat([f[name] for f in found]), expected[name], atol=1e-5, rtol=1e-5
        )
    for name in ("weight", "bias"):
        torch.testing.assert_close(
            sum(f[name] for f in found), expected[name], atol=1e-4, rtol=1e-5
        )
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        for of_rank in found:
            torch.testing.assert_close(of_rank[name], expected[name], atol=1e-5, rtol=1e-5)


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


class Reshapes(nn.Module):
    """A network that reshapes, and uses a layer of batch norm twice; an empty batch must pass."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3, padding=1, bias=False)
        self.second = nn.Conv2d(6, 9, 3, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.another = nn.BatchNorm2d(9)
        self.last = nn.BatchNorm1d(36)
        self.linear = nn.Linear(36, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.norm(self.norm(self.first(images)).tanh())
        hidden = F.interpolate(self.another(self.second(hidden)).tanh(), size=5, mode="bilinear")
        hidden = hidden.reshape(len(hidden), 3, -1).view(len(hidden), 9, 5, 5)
        hidden = F.adaptive_avg_pool2d(hidden, 2).flatten(1)
        return self.linear(self.last(hidden.view(hidden.size(0), -1)))


STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@pytest.mark.parametrize(
    ("size", "joined"),
    [
        (10, 20),  # one rank has no micro-batch
        (4, 12),  # two passes, of 12 samples and of 8
    ],
)
def test_a_training_on_ranks_equals_one_with_the_joined_batch(size: int, joined: int) -> None:
    one = small_config(batch_size=joined, epochs=2, output_dir=Path("one"))
    _, expected = trained(LocalWorld(), one, Reshapes)
    config = small_config(batch_size=size, epochs=2, sync_batch_norm=True, output_dir=Path("ranks"))
    # statistics move once per micro-batch
    names = [name for name in expected if joined == 20 or not name.endswith(STATISTICS)]
    wanted = {name: expected[name] for name in names}
    results = [
        weights for _, weights in run_ranks(3, lambda world: trained(world, config, Reshapes))
    ]
    for weights in results:
        assert largest_difference({name: weights[name] for name in names}, wanted) <= 1e-5
        assert equal(weights, results[0])
    apart = config.replace(output_dir=Path("apart"), sync_batch_norm=False)
    assert largest_difference(trained(LocalWorld(), apart, Reshapes)[1], expected) > 1e-3


def test_a_micro_batch_of_one_sample_is_an_error_of_use() -> None:
    make = lambda classes: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, classes))  # noqa: E731
    with pytest.raises(UsageError, match=r"batch norm needs two samples.* --batch-size"):
        trained(LocalWorld(), small_config(batch_size=1), make)
