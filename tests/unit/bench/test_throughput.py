"""The real step by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvd_train import recipes
from hvd_train.bench import throughput
from hvd_train.bench.record import written
from hvd_train.data.dataset import Arrays, DataSet
from hvd_train.progress.clock import PHASES
from hvd_train.world.world import LocalWorld
from tests.support.documented import missing
from tests.support.runs import small_config


def test_the_phases_of_a_step_add_up_to_it() -> None:
    """What is measured as a whole and what is measured in parts is the same time."""
    config = throughput.without_files(small_config(), own_data=False)
    found = throughput.measure(config, LocalWorld(), steps=5, repetitions=3)
    assert sum(found["split"].values()) == pytest.approx(found["seconds_per_step"], rel=0.1)
    assert set(found["split"]) == set(PHASES)
    assert found["images_per_second"] == found["images_per_second_per_worker"] > 0
    assert len(found["images_per_second_of_repetitions"]) == 3
    json.dumps(found, allow_nan=False)


def test_random_images_take_the_place_of_files() -> None:
    """A recipe for files that are not here can be measured: images of its size, and no weights to fetch."""
    for name, size in (("imagenet-resnet50", 224), ("cifar10-resnet18-transfer", 224), ("cifar10-resnet50", 32)):
        config = throughput.without_files(recipes.get(name), own_data=False)
        assert (config.data.data, config.data.image_size, config.model.weights) == ("synthetic", size, None)
    assert throughput.without_files(recipes.get("digits"), own_data=True).data.data == "digits"


@pytest.mark.parametrize("recipe", ["digits", "cifar10-resnet50", "imagenet-resnet50"])
def test_the_network_is_that_of_the_recipe(recipe: str) -> None:
    """As many classes and channels as its data have, so as many parameters as a training of it says that it has."""
    config = recipes.get(recipe)
    images = throughput.images_like(config.data.data)
    data = images(throughput.without_files(config, own_data=False).data)
    expected = {"digits": (1, 10, 8), "cifar10-resnet50": (3, 10, 32), "imagenet-resnet50": (3, 1000, 224)}[recipe]
    assert isinstance(data, DataSet)
    assert (data.channels, len(data.classes), data.image_size) == expected
    assert isinstance(data.train, Arrays)
    assert data.train.inputs.shape[1:] == (expected[0], expected[2], expected[2])
    assert int(data.train.targets.max()) < expected[1]


def test_digits_are_measured_with_ten_classes() -> None:
    """The record says so, and has the parameters of the recipe's network."""
    config, images = throughput.without_files(recipes.get("digits"), own_data=False), throughput.images_like("digits")
    found = throughput.measure(config.replace(device="cpu"), LocalWorld(), steps=1, repetitions=2, images=images)
    assert (found["classes"], round(found["parameters"] / 1e6, 2)) == (10, 0.09)
    table = throughput.table(found)
    assert "(0.09 M parameters) on synthetic images of 8 pixels, 10 classes" in table
    assert f"{written(found['gflop_per_image'])} GFLOP per image" in table
    assert missing({"bench": "throughput", **found}) == set()


def test_random_images_need_no_cache() -> None:
    """A run that keeps images of files can be measured without them, too."""
    config = small_config(data="folder", data_dir=Path("data"), cache="disk", cache_dir=Path("cache"))
    assert throughput.without_files(config, own_data=False).data.cache == "none"
