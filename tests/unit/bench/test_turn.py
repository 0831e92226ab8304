"""A turn of `hvd-train tune`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvd_train import recipes
from hvd_train.bench import tune, turn


def test_noise_takes_the_place_of_images_that_would_be_read() -> None:
    """A recipe for files that are not here can be tuned: images of its size, no weights, no loader processes."""
    config = turn.stand_in(recipes.get("imagenet-resnet50"))
    assert (config.data.data, config.data.image_size, config.model.weights) == ("synthetic", 224, None)
    assert config.data.workers == 0
    assert turn.stand_in(recipes.get("cifar10-resnet50")).data.image_size == 32
    assert turn.stand_in(recipes.get("digits")).data.data == "digits"


def test_rank_0_prints_the_seconds_of_a_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line that `tune` finds by what it begins with, and no run folder."""
    monkeypatch.setenv(tune.LOG, "")
    turn.take(recipes.get("digits").replace(device="cpu"), 0.05)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(tune.ANSWER)]
    assert len(lines) == 1
    assert 0 < json.loads(lines[0].removeprefix(tune.ANSWER))["seconds"] < 10
    assert not list(Path().iterdir())
