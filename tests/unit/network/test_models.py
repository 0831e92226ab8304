"""Models by name, and models of the user."""

import copy

import pytest
import torch
from torch import nn

from hvd_train import parts
from hvd_train.network import models
from hvd_train.world.world import LocalWorld
from tests.support.runs import convnet, few_digits, small_config


def test_models_of_timm_by_name() -> None:
    for channels in (1, 3):
        model = models.build("timm:resnet10t", num_classes=7, channels=channels, seed=0)
        assert model.eval()(torch.zeros(2, channels, 32, 32)).shape == (2, 7)


def test_the_digits_network_pools_as_adaptively_as_torch() -> None:
    """Its own pooling has a deterministic gradient on GPUs."""
    model = models.digits_convnet(10)
    for size in range(8, 14):
        images = torch.cos(torch.arange(2.0 * size * (size + 1))).view(2, 1, size, size + 1)
        expected = model[8:](nn.AdaptiveMaxPool2d(2)(model[:7](images)))
        assert torch.equal(model(images), expected)


@pytest.mark.parametrize(
    ("model", "own", "form"),
    [
        ("digits-convnet", None, torch.channels_last),
        ("mobilenet_v3_small", None, torch.channels_last),
        ("resnet18", None, torch.contiguous_format),
        ("digits-convnet", convnet, torch.contiguous_format),
    ],
)
def test_models_that_are_faster_with_it_have_channels_last_on_cpus(
    model: str, own: models.Builder | None, form: torch.memory_format
) -> None:
    """A model of the user keeps its format: its code may need it, as `view` does."""
    built = parts.build(small_config(model=model), LocalWorld().place, parts.Own(own, few_digits))
    for weights in built.model.parameters():
        assert weights.ndim < 4 or weights.is_contiguous(memory_format=form)
    assert not models.suits_channels_last("mine:net", nn.Conv2d(1, 1, 1))
    if model == "mobilenet_v3_small":
        assert built.train_loader.example(2)[0].is_contiguous(memory_format=form)


def test_a_model_with_convolutions_of_images_and_volumes_may_have_channels_last() -> None:
    """Strides of weights are those of torch, which gradients have, too."""
    model = nn.ModuleList([nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 1), nn.Conv3d(2, 2, 3)])
    images = copy.deepcopy(model[:2]).to(memory_format=torch.channels_last)
    models.put_channels_last(model)
    assert [each.weight.stride() for each in model[:2]] == [each.weight.stride() for each in images]
    assert model[2].weight.is_contiguous()
