"""Networks by name, and the user's own code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hvd_train.errors import UsageError
from hvd_train.network import models
from tests.support.runs import equal


@pytest.fixture
def own() -> Iterator[str]:
    """A module in the folder that the command is started from."""
    Path("my_networks.py").write_text(
        "import torch\n"
        "def linear(classes):\n    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, classes))\n"
        "def text(classes):\n    return 'a model'\n"
        "value = 3\n"
    )
    yield "my_networks"
    sys.modules.pop("my_networks", None)


def test_the_seed_decides_the_weights() -> None:
    """The same seed gives the same bits, another one others."""
    first, same, other = (
        models.build("digits-convnet", num_outputs=10, channels=1, seed=seed).state_dict() for seed in (3, 3, 4)
    )
    assert equal(first, same)
    assert not equal(first, other)


@pytest.mark.parametrize("name", ["resnet18", "googlenet"])
def test_torchvision_models_by_name(name: str) -> None:
    """They get the number of classes of the data, and answer with logits in training too."""
    assert models.needs_colour(name)
    model = models.build(name, num_outputs=7, channels=3, seed=0)
    assert model.train()(torch.zeros(2, 3, 64, 64)).shape == (2, 7)


def test_models_of_timm_by_name() -> None:
    """`timm:NAME`, with as many classes as the data; a name it does not have is answered with the nearest."""
    assert models.needs_colour("timm:resnet10t")
    model = models.build("timm:resnet10t", num_outputs=7, channels=3, seed=0)
    assert model.eval()(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
    with pytest.raises(UsageError, match="unknown model of timm 'resnet10'; did you mean"):
        models.check_name("timm:resnet10")


def test_without_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that says what to type."""
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UsageError, match="pip install timm"):
        models.check_name("timm:resnet10t")


def test_digits_convnet_is_small_and_takes_grey_images() -> None:
    """0.1 million parameters, one channel."""
    model = models.build("digits-convnet", num_outputs=10, channels=1, seed=0)
    assert not models.needs_colour("digits-convnet")
    assert sum(p.numel() for p in model.parameters()) < 110_000
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_an_unknown_model_is_answered_with_the_nearest() -> None:
    """`resnet81` is `resnet18`; segmentation models are not offered."""
    with pytest.raises(UsageError, match="unknown model 'resnet81'; did you mean 'resnet18'"):
        models.check_name("resnet81")
    with pytest.raises(UsageError, match="unknown model 'digits_convnet'; did you mean 'digits-convnet'"):
        models.check_name("digits_convnet")
    with pytest.raises(UsageError, match="unknown model"):
        models.check_name("fcn_resnet50")
    models.check_name("vit_b_16")


def test_own_models_by_name(own: str) -> None:
    """`module:function` from the current folder, without it on the import path."""
    models.check_name(f"{own}:linear")
    model = models.build(f"{own}:linear", num_outputs=5, channels=1, seed=0)
    assert model(torch.zeros(2, 1, 2, 2)).shape == (2, 5)


def test_a_function_that_makes_no_module_is_refused(own: str) -> None:
    """What it returned is said."""
    with pytest.raises(UsageError, match=r"it returned str, not a torch\.nn\.Module"):
        models.build(f"{own}:text", num_outputs=5, channels=1, seed=0)


HEADS = {
    "resnet18": "fc",
    "vgg11": "classifier.6",
    "squeezenet1_1": "classifier.1",
    "mobilenet_v3_small": "classifier.3",
    "densenet121": "classifier",
    "vit_b_16": "heads.head",
    "convnext_tiny": "classifier.2",
    "digits-convnet": "11",
}


@pytest.mark.parametrize("name", HEADS)
def test_the_head_of_many_networks(name: str) -> None:
    """What makes the logits, by name."""
    with torch.device("meta"):
        assert models.head_of(models.build(name, num_outputs=7, channels=3, seed=0)) == HEADS[name]


def test_torchvision_is_asked_for_what_the_run_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights and the run's classes; where a model of its has auxiliary classifiers, none of them."""
    import torchvision

    asked: list[tuple[str, dict[str, object]]] = []

    def get_model(name: str, **settings: object) -> nn.Module:
        asked.append((name, settings))
        return nn.Identity()

    monkeypatch.setattr(torchvision.models, "get_model", get_model)
    for name in ("resnet18", "googlenet", "inception_v3"):
        models.build(name, num_outputs=7, channels=3, seed=0)
    plain: dict[str, object] = {"weights": None, "num_classes": 7}
    without = {**plain, "aux_logits": False}
    assert asked == [("resnet18", plain), ("googlenet", without), ("inception_v3", without)]


def test_timm_is_asked_for_the_classes_and_channels_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own name for the model."""
    asked: list[tuple[str, dict[str, int]]] = []
    timm = SimpleNamespace(create_model=lambda name, **given: asked.append((name, given)) or nn.Identity())
    monkeypatch.setitem(sys.modules, "timm", timm)  # type: ignore[arg-type]
    models.build("timm:resnet10t", num_outputs=7, channels=1, seed=0)
    assert asked == [("resnet10t", {"num_classes": 7, "in_chans": 1})]


def test_a_users_function_goes_before_a_name(own: str) -> None:
    """It decides about channels by itself, and its weights are drawn from the seed as well."""
    asked: list[int] = []

    def make(num_classes: int) -> nn.Module:
        asked.append(num_classes)
        return nn.Linear(2, num_classes)

    for name in ("resnet18", "timm:resnet10t", f"{own}:linear"):
        first, second = (models.build(name, num_outputs=7, channels=3, seed=5, own=make) for _ in range(2))
        assert torch.equal(first.weight, second.weight)
    assert asked == [7] * 6
    assert not models.needs_colour(f"{own}:linear")


def test_a_function_that_is_not_there_is_told_by_its_flag(own: str) -> None:
    """As soon as the name is known, and again where a model is to be made of it."""
    for use in (models.check_name, lambda name: models.build(name, num_outputs=5, channels=1, seed=0)):
        with pytest.raises(UsageError, match="--model nothing_here:make: cannot import nothing_here"):
            use("nothing_here:make")
        with pytest.raises(UsageError, match=f"unknown function in {own} for --model 'lineal'; did you mean 'linear'"):
            use(f"{own}:lineal")


def test_a_model_without_layers_that_could_make_logits_has_no_head() -> None:
    """A convolution may be one, as in SqueezeNet; batch norm and activations are none."""
    assert models.head_of(nn.Sequential(nn.BatchNorm1d(3), nn.ReLU())) is None
    assert models.head_of(nn.Sequential(nn.Linear(2, 2), nn.Conv1d(2, 2, 1), nn.ReLU())) == "1"
