"""Models by name, and models of the user."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hvd_train.errors import UsageError
from hvd_train.network import models


def test_models_of_timm_by_name() -> None:
    for channels in (1, 3):
        model = models.build("timm:resnet10t", num_classes=7, channels=channels, seed=0)
        assert model.eval()(torch.zeros(2, channels, 32, 32)).shape == (2, 7)


class InTraining(nn.Module):
    """A network that returns another value in training, and counts its calls."""

    def __init__(self, change: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.body, self.change, self.calls = nn.Sequential(nn.Linear(4, 10), nn.BatchNorm1d(10)), change, 0

    def forward(self, images: Tensor) -> object:
        self.calls += self.training
        logits = nn.functional.dropout(self.body(images), training=self.training)
        return self.change(logits) if self.training else logits


def test_a_model_that_returns_no_logits_is_refused() -> None:
    for change in (lambda x: (x, x), lambda x: {"logits": x}):
        with pytest.raises(UsageError, match=r"model m returns .* in training; it must return logits"):
            models.check_fits(InTraining(change), "m", torch.zeros(2, 4), 10, trains=True)


def test_a_check_changes_neither_model_nor_random_numbers() -> None:
    model = InTraining(lambda logits: logits)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    models.check_fits(model, "m", torch.rand(2, 4, generator=torch.Generator()), 10, trains=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert model.calls == 0


def test_the_digits_network_pools_as_adaptively_as_torch() -> None:
    """Its own pooling has a deterministic gradient on GPUs."""
    model = models.digits_convnet(10)
    for size in range(8, 14):
        images = torch.cos(torch.arange(2.0 * size * (size + 1))).view(2, 1, size, size + 1)
        expected = model[8:](nn.AdaptiveMaxPool2d(2)(model[:7](images)))
        assert torch.equal(model(images), expected)
