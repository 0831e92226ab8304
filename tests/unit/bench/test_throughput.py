"""The real step by itself."""

from __future__ import annotations

import json

import pytest

from hvd_train import recipes
from hvd_train.bench import throughput
from hvd_train.progress.clock import PHASES
from hvd_train.world.world import LocalWorld
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
