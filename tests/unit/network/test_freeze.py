"""Frozen parameters, and parameters that are trained since a later epoch."""

from collections.abc import Callable
from typing import Any

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
        mean: Tensor = (self.head(features) + self.head_dist(features)) / 2
        return mean


class OfTimm(Heads):
    """Has a classifier with a layer of its own before the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 10))  # type: ignore[assignment]

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
        found: Tensor = self.out(self.middle(self.words(images.flatten(1).long() % 10)).mean(1))
        return found


def convolution() -> nn.Module:
    layers = (
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 10, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    return nn.Sequential(*layers)


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 16), nn.utils.parametrizations.weight_norm(nn.Linear(16, 10))
    )


@pytest.mark.parametrize(
    ("make", "trained_ones"),
    [
        (Heads, {"head.weight", "head.bias", "head_dist.weight", "head_dist.bias"}),
        (
            OfTimm,
            {
                "head.0.weight",
                "head.0.bias",
                "head.1.weight",
                "head.1.bias",
                "head_dist.weight",
                "head_dist.bias",
            },
        ),
        (convolution, {"2.weight", "2.bias"}),
        (
            normed,
            {
                "2.parametrizations.weight.original0",
                "2.parametrizations.weight.original1",
                "2.bias",
            },
        ),
        (Tied, {"words.weight"}),
    ],
)
def test_all_heads_are_trained(
    make: Callable[[], nn.Module], trained_ones: set[str], capsys: pytest.CaptureFixture[str]
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
    changed = {
        name for name, value in model.named_parameters() if not torch.equal(before[name], value)
    }
    assert changed == trained_ones
    assert (
        f"--freeze backbone trains {len(changed)} of {len(before)} parameters: "
        in capsys.readouterr().out
    )


GRADUAL: dict[str, Any] = {"freeze": "backbone", "unfreeze": ("1:1.*", "3:*"), "epochs": 4}


def test_thawing_is_a_function_of_the_epoch() -> None:
    model = runs.batch_norm(10)
    config = Config().replace(**GRADUAL).model
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    trainable = []
    for epoch in range(5):
        freeze.apply(config, model, epoch, ["5"])
        trainable.append(
            {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad}
        )
        assert model[1].training == (epoch >= 1), "frozen batch norm must stay in evaluation mode"
        if epoch == 0:
            assert {name for name, p in model.named_parameters() if p.grad is not None} == {
                "5.weight",
                "5.bias",
            }
    assert trainable == [{"5"}, {"1", "5"}, {"1", "5"}, {"0", "1", "5"}, {"0", "1", "5"}]
    freeze.apply(config, model, 0, ["5"])
    freeze.apply(config, model, heads=["5"])
    assert all(parameter.requires_grad for parameter in model.parameters())
