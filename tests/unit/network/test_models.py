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
    with pytest.raises(UsageError, match="unknown model of timm 'resnet10'; did you mean"):
        models.check_name("timm:resnet10")


def test_own_models_by_name() -> None:
    with pytest.raises(UsageError, match="unknown model 'resnet81'; did you mean 'resnet18'"):
        models.check_name("resnet81")
    with pytest.raises(UsageError, match=r"it returned str, not a torch\.nn\.Module"):
        models.build("mine:net", num_classes=5, channels=1, seed=0, own=lambda classes: "a model")
    with pytest.raises(UsageError, match="--model mine:net is a model already: write a function that returns it"):
        models.build("mine:net", num_classes=5, channels=1, seed=0, own=nn.Identity())


def test_a_model_that_cannot_take_the_images_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 9), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(10)).train()
    with pytest.raises(UsageError, match=r"model m cannot take images of 3 x 8 x 8: .*--image-size") as error:
        models.check_fits(model, "m", torch.zeros(2, 3, 8, 8), 10)
    assert "\n" not in str(error.value)
    assert model.training
    with pytest.raises(UsageError, match=r"images of 4: only in training \(.*test_models\.py, line \d+, in forward\)$"):
        models.check_fits(Refuses(), "mine:net", torch.zeros(2, 4), 10)


class Refuses(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        raise ValueError("only in training")


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
    with pytest.raises(UsageError, match=r"shape \(2, 4\); it must .*shape \[batch, 10\]: let it accept num_classes"):
        models.check_fits(nn.Flatten(), "m", torch.zeros(2, 1, 2, 2), 10)
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
