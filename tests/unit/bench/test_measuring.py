"""`hvd-train bench throughput` and `bench batch`, and their records."""

import json
from pathlib import Path
from typing import Any

import pytest

from hvd_train import cli, recipes
from hvd_train.bench import batch, throughput
from hvd_train.config import Config
from hvd_train.errors import UsageError
from hvd_train.progress.clock import PHASES
from hvd_train.world.world import LocalWorld, World
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
        assert (config.data.data, config.data.image_size, config.model.weights) == ("synthetic", size, None)
        assert config.data.synthetic_classes == classes
    assert throughput.without_files(recipes.get("digits"), own_data=False).data.data == "digits"


def test_batches_double_until_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU until they get slower; the table marks the fastest batch and the largest."""
    speeds = {2: 10.0, 4: 30.0, 8: 20.0, 16: 28.0, 32: 20.0}

    def measure(config: Config, world: World, **times: int) -> dict[str, Any]:
        size = config.batch.batch_size
        device = config.run.device
        if device == "cuda" and size == 64:
            raise UsageError("out of GPU memory in a micro-batch of 64 (peak 9.0 GiB): type --batch-size 32")
        return {"device": device, "samples_per_second_of_repetitions": [1.0, speeds[size]], "peak_memory_gib": 0.1}

    monkeypatch.setattr(throughput, "measure", measure)
    for device, ended in (
        ("cpu", "32: slower than smaller ones"),
        ("cuda", "64: out of GPU memory in a micro-batch of"),
    ):
        found = batch.measure(small_config(device=device), LocalWorld(), largest=4096, steps=1, repetitions=1)
        assert (found["fastest"], found["largest"]) == (4, 32)
        assert found["ended"].startswith(ended)
        rows = [line.split() for line in batch.table(found).splitlines()]
        assert [(row[0], row[-1]) for row in rows[1:] if row[-1].isalpha()] == [("4", "fastest"), ("32", "largest")]
    assert batch.measure(small_config(), LocalWorld(), largest=15, steps=1, repetitions=1)["largest"] == 8


def test_the_batches_of_a_recipe_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    line = "bench batch digits --largest 2 --steps 1 --repetitions 1 --device cpu --json found.json"
    assert cli.run(line.split()) == 0
    found = json.loads(Path("found.json").read_text())
    assert (found["bench"], found["fastest"], found["ended"]) == ("batch", 2, "4: more than --largest 2")
    assert "fastest: --batch-size 2" in capsys.readouterr().out
