"""Frozen parameters, and parameters that are trained since a later epoch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hvd_train.config import Config
from hvd_train.network import freeze
from hvd_train.run import train
from hvd_train.world.world import LocalWorld
from tests.support import runs
from tests.support.runs import small_config


class Heads(nn.Module):
    """Has two heads, of which the mean is the answer; one is defined before
    the layer that they follow.
    """

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 10)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
        self.head_dist = nn.Linear(16, 10)
        self.unused = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = self.body(images)
        return (self.head(features) + self.head_dist(features)) / 2


class OfTimm(Heads):
    """Has a classifier with a layer of its own before the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 10))

    def get_classifier(self) -> tuple[nn.Module, nn.Module]:
        return self.head, self.head_dist


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.middle = nn.Linear(4, 4)
        self.out = nn.Linear(4, 10, bias=False)
        self.out.weight = self.words.weight

    def forward(self, images: Tensor) -> Tensor:
        return self.out(self.middle(self.words(images.flatten(1).long() % 10)).mean(1))


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 10, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 16), nn.utils.parametrizations.weight_norm(nn.Linear(16, 10))
    )


@pytest.mark.parametrize(
    ("make", "trained_ones"),
    [
        (Heads, "head.weight head.bias head_dist.weight head_dist.bias"),
        (
            OfTimm,
            "head.0.weight head.0.bias head.1.weight head.1.bias head_dist.weight head_dist.bias",
        ),
        (convolution, "2.weight 2.bias"),
        (
            normed,
            "2.bias 2.parametrizations.weight.original0 2.parametrizations.weight.original1",
        ),
        (Tied, "words.weight"),
    ],
)
def test_all_heads_are_trained(
    make: Callable[[], nn.Module], trained_ones: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever they are defined; a line says which parameters they have."""
    model = make()
    before = {name: value.clone() for name, value in model.named_parameters()}
    train(
        small_config(freeze="backbone", epochs=1),
        model=lambda _: model,
        data=runs.few_digits,
        world=LocalWorld(),
    )
    changed = [
        name for name, value in model.named_parameters() if not torch.equal(before[name], value)
    ]
    assert changed == trained_ones.split()
    line = f"--freeze backbone trains {len(changed)} of {len(before)} parameters: "
    assert line in capsys.readouterr().out


def test_thawing_is_a_function_of_the_epoch() -> None:
    model = runs.batch_norm(10)
    config = Config().replace(freeze="backbone", unfreeze=("1:1.*", "3:*"), epochs=4).model
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for epoch, layers in enumerate(("5", "15", "15", "015", "015")):
        freeze.apply(config, model, epoch, ["5"])
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad == (name[0] in layers)
            # it may thaw in a later epoch
            assert (parameter.grad is not None) == (name[0] == "5")
        assert model[1].training == (epoch >= 1), "frozen batch norm must stay in evaluation mode"
    freeze.apply(config, model, 0, ["5"])
    freeze.apply(config, model, heads=["5"])
    assert all(parameter.requires_grad for parameter in model.parameters())
