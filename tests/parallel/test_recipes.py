"""The first steps of every recipe on GPUs, with a little data in its real format."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torchvision.models import get_model, get_model_weights

from hvd_train import recipes
from hvd_train.run import train
from hvd_train.world.world import World
from tests.support import cifar, jpegs
from tests.support.device import DEVICE

SETTINGS: dict[str, dict[str, Any]] = {
    "digits": {},
    "diabetes": {},
    "digit-shapes": {"global_batch_size": 400, "batch_size": 100},
    "python-docs": {"global_batch_size": 800, "batch_size": 100},
    "cifar10-resnet18-transfer": {"batch_size": 8, "accumulation_steps": 4},
    "cifar10-resnet50": {"batch_size": 25},
    # VGG-19 has 140 million weights, and SqueezeNet all kinds of its layers but one, which the others have.
    "imagenet20-vgg19": {"batch_size": 10, "model": "squeezenet1_1"},
    "imagenet-resnet50": {"batch_size": 5},
    "imagenet-resnet50-modern": {
        "batch_size": 10, "repeated_augmentation": 2, "epochs": 2, "val_crop_size": 40, "val_resize_size": 44,
        "model": "resnet18",  # ResNet-50 is in the one above
    },
}  # fmt: skip


@pytest.mark.parallel
@pytest.mark.skipif(DEVICE.type == "cpu", reason="on CPUs the recipes run by themselves, in test_recipes.py")
@pytest.mark.parametrize("name", recipes.RECIPES)
def test_first_steps(name: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the recipe's own precision, layout and loss scale all ranks come to the end with equal, finite weights."""
    monkeypatch.setenv("TORCH_HOME", "home")
    small: dict[str, Any] = {"epochs": 1, "warmup_epochs": 0.0, "workers": 0, "workers_per_host": None}
    config = recipes.get(name).replace(device="cuda", output_dir=Path("run"), **{**small, **SETTINGS[name]})
    if config.data.data not in ("digits", "diabetes", "digit-shapes", "python-docs"):
        config = config.replace(image_size=32, data_dir=Path("data"))
        if config.data.data == "cifar10":
            cifar.unpack(cifar.publish("cifar10", Path("web"), monkeypatch), Path("data"))
        else:
            jpegs.digits(
                Path("data"), range(20 if name == "imagenet20-vgg19" else 10), most=2, test=name == "imagenet20-vgg19"
            )
    if config.model.weights is not None:
        torch.manual_seed(5)
        path = Path("home/hub/checkpoints") / get_model_weights(config.model.model)["DEFAULT"].url.rpartition("/")[2]
        path.parent.mkdir(parents=True)
        torch.save(get_model(config.model.model).state_dict(), path)
    with sdpa_kernel(SDPBackend.MATH):  # of attention the stand-in for CUDA has no other kernel
        result = train(config, world=world)
    assert (result.finished, result.steps >= 2) == (True, True)
    assert math.isfinite(result.scores["loss"])
