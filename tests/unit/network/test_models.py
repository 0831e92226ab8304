"""Networks by name, and the user's own code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from hvd_train.errors import UsageError
from hvd_train.network import models


@pytest.fixture
def own() -> Iterator[str]:
    Path("my_networks.py").write_text(
        "import torch\n"
        "def linear(classes):\n    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, classes))\n"
        "def text(classes):\n    return 'a model'\n"
    )
    yield "my_networks"
    sys.modules.pop("my_networks", None)


@pytest.mark.parametrize("name", ["resnet18", "googlenet"])
def test_torchvision_models_by_name(name: str) -> None:
    """They get the number of classes of the data, and answer with logits in training too."""
    assert models.needs_colour(name)
    model = models.build(name, num_classes=7, channels=3, seed=0)
    assert model.train()(torch.zeros(2, 3, 64, 64)).shape == (2, 7)


def test_models_of_timm_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timm:NAME`, with the classes and channels of the data; without timm one line says what to type."""
    for channels in (1, 3):
        model = models.build("timm:resnet10t", num_classes=7, channels=channels, seed=0)
        assert model.eval()(torch.zeros(2, channels, 32, 32)).shape == (2, 7)
    with pytest.raises(UsageError, match="unknown model of timm 'resnet10'; did you mean"):
        models.check_name("timm:resnet10")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UsageError, match="pip install timm"):
        models.check_name("timm:resnet10t")


def test_digits_convnet_has_the_layers_of_its_checkpoints() -> None:
    """0.09 million parameters, for grey images of 8 x 8 pixels or a few more."""
    model = models.build("digits-convnet", num_classes=10, channels=1, seed=0)
    assert not models.needs_colour("digits-convnet")
    assert 85_000 < sum(p.numel() for p in model.parameters()) < 95_000
    assert {name: tuple(value.shape) for name, value in model.state_dict().items() if name.endswith("weight")} == {
        "0.weight": (32, 1, 3, 3),
        "2.weight": (64, 32, 3, 3),
        "5.weight": (64, 64, 3, 3),
        "9.weight": (128, 256),
        "11.weight": (10, 128),
    }
    models.check_fits(model, "digits-convnet", torch.zeros(2, 1, 8, 8), 10)
    models.check_fits(model, "digits-convnet", torch.zeros(1, 1, 12, 9), 10)


def test_an_unknown_model_is_answered_with_the_nearest() -> None:
    """Segmentation models are not offered."""
    with pytest.raises(UsageError, match="unknown model 'resnet81'; did you mean 'resnet18'"):
        models.check_name("resnet81")
    with pytest.raises(UsageError, match="unknown model 'digits_convnet'; did you mean 'digits-convnet'"):
        models.check_name("digits_convnet")
    with pytest.raises(UsageError, match="unknown model"):
        models.check_name("fcn_resnet50")
    models.check_name("vit_b_16")


def test_own_models_by_name(own: str) -> None:
    """`module:function` from the current folder; a function that makes no module is refused."""
    models.check_name(f"{own}:linear")
    model = models.build(f"{own}:linear", num_classes=5, channels=1, seed=0)
    assert model(torch.zeros(2, 1, 2, 2)).shape == (2, 5)
    with pytest.raises(UsageError, match=r"it returned str, not a torch\.nn\.Module"):
        models.build(f"{own}:text", num_classes=5, channels=1, seed=0)
    with pytest.raises(UsageError, match=f"unknown function in {own} for --model 'lineal'; did you mean 'linear'"):
        models.check_name(f"{own}:lineal")


def test_a_users_function_goes_before_a_name() -> None:
    """`train(model=...)`; its weights are drawn from the seed as well."""
    first, second, other = (
        models.build("resnet18", num_classes=7, channels=3, seed=seed, own=lambda classes: nn.Linear(2, classes))
        for seed in (5, 5, 6)
    )
    assert first.weight.shape == (7, 2)
    assert torch.equal(first.weight, second.weight)
    assert not torch.equal(first.weight, other.weight)


def test_a_model_that_cannot_take_the_images_is_refused() -> None:
    """One line with the shape, torch's reason and what to try."""
    model = nn.Sequential(nn.Conv2d(3, 4, 9), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(10)).train()
    with pytest.raises(UsageError, match=r"model m cannot take images of 3 x 8 x 8: .*--image-size") as told:
        models.check_fits(model, "m", torch.zeros(2, 3, 8, 8), 10)
    assert "\n" not in str(told.value)
    assert model.training


@pytest.mark.parametrize(
    ("model", "got"),
    [
        (nn.Flatten(), r"shape \(2, 4\)"),
        (nn.Flatten(0), r"shape \(8,\)"),
        (nn.AdaptiveMaxPool2d(1, return_indices=True), "tuple"),
    ],
)
def test_a_model_that_returns_no_logits_is_refused(model: nn.Module, got: str) -> None:
    """The error says what it returns, and what it must return."""
    with pytest.raises(UsageError, match=rf"model m returns {got}; it must return logits of shape \[batch, 10\]"):
        models.check_fits(model, "m", torch.zeros(2, 1, 2, 2), 10)


def test_checking_a_model_leaves_no_trace() -> None:
    """One image is enough; modes, gradients and statistics of batch norm are as before."""
    for training in (False, True):
        model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 10)).train(training)
        models.check_fits(model, "m", torch.ones(1, 1, 2, 2), 10)
        assert [module.training for module in model.modules()] == [training] * 4
        assert model[1].num_batches_tracked == 0
        assert all(p.grad is None for p in model.parameters())


HEADS = {
    "resnet18": "fc",
    "vgg11": "classifier.6",
    "squeezenet1_1": "classifier.1",
    "vit_b_16": "heads.head",
    "digits-convnet": "11",
}


@pytest.mark.parametrize("name", HEADS)
def test_the_head_of_many_networks(name: str) -> None:
    """`--freeze backbone` and `--weights` need the name of the layer that makes the logits."""
    with torch.device("meta"):
        assert models.head_of(models.build(name, num_classes=7, channels=3, seed=0)) == HEADS[name]
    assert models.head_of(nn.Sequential(nn.BatchNorm1d(3), nn.ReLU())) is None
