"""`hvd-train bench throughput`, and its record."""

import json

import pytest
from scipy import stats

from hvd_train import recipes
from hvd_train.bench import record, throughput
from hvd_train.progress.clock import PHASES
from hvd_train.world.world import LocalWorld
from tests.support.runs import small_config


def test_the_record_of_a_step() -> None:
    config = throughput.without_files(small_config(), own_data=False)
    found = throughput.measure(config, LocalWorld(), steps=2, repetitions=2)
    assert set(found["split"]) == set(PHASES)
    assert found["samples_per_second"] == found["samples_per_second_per_worker"] > 0
    assert len(found["samples_per_second_of_repetitions"]) == 2
    json.dumps(found, allow_nan=False)


def test_random_images_replace_files() -> None:
    """They have the size of the recipe, and no weights are downloaded."""
    for name, size, classes in (("imagenet-resnet50", 224, 1000), ("cifar10-resnet50", 32, 10)):
        config = throughput.without_files(recipes.get(name), own_data=False)
        assert (config.data.data, config.data.image_size, config.model.weights) == ("synthetic", size, None)
        assert config.data.synthetic_classes == classes
    assert throughput.without_files(recipes.get("digits"), own_data=False).data.data == "digits"


@pytest.mark.parametrize("count", [3, 60])
def test_the_interval_is_students(count: int) -> None:
    """A single repetition has none, and its ends are not negative."""
    values = [9.0 + number * number % 7 for number in range(count)]
    mean, found = record.estimate(values)
    assert found == pytest.approx(stats.t.interval(0.95, count - 1, mean, stats.sem(values)), rel=3e-3, abs=3e-3)
    assert record.estimate([3.0]) == (3.0, None)
    assert record.estimate([1.0, 100.0])[1][0] == 0
