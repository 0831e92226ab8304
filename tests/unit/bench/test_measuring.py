"""`hvd-train bench throughput` and its record."""

import json

from hvd_train import recipes
from hvd_train.bench import throughput
from hvd_train.progress.clock import PHASES
from hvd_train.world.world import LocalWorld
from tests.support.runs import small_config


def test_the_record_of_a_step() -> None:
    config = throughput.without_files(small_config(), own_data=False)
    found = throughput.measure(config, LocalWorld(), steps=2, repetitions=2)
    assert set(found["split"]) == set(PHASES)
    assert found["samples_per_second"] > 0
    assert len(found["samples_per_second_of_repetitions"]) == 2
    json.dumps(found, allow_nan=False)


def test_random_images_replace_files() -> None:
    """They have the size of the recipe, and no weights are downloaded."""
    for name, size, classes in (("imagenet-resnet50", 224, 1000), ("cifar10-resnet50", 32, 10)):
        config = throughput.without_files(recipes.get(name), own_data=False)
        assert (config.data.data, config.data.image_size, config.model.weights) == (
            "synthetic",
            size,
            None,
        )
        assert config.data.synthetic_classes == classes
    assert throughput.without_files(recipes.get("digits"), own_data=False).data.data == "digits"
