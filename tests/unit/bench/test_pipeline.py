"""The input by itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hvd_train import recipes
from hvd_train.bench import pipeline
from hvd_train.config import Config
from hvd_train.settings.data import DataConfig
from hvd_train.world.world import LocalWorld


@pytest.mark.parametrize(
    ("workers", "cores", "limit"),
    [(0, 8, "decode"), (4, 8, "prepare"), (4, 1, "decode"), (1, 8, "decode")],
)
def test_which_stage_limits(workers: int, cores: int, limit: str) -> None:
    """Loader processes share the work of theirs, as far as there are cores for them."""
    assert pipeline.limiting({"read": 1.0, "decode": 5.0, "prepare": 2.0, "transfer": 1.0}, workers, cores) == limit


class Slow(Sequence[Any]):
    """Four images that take their time to come."""

    classes = ("a", "b")

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: Any) -> Any:
        time.sleep(0.01)
        return torch.zeros(3, 8, 8), index % 2


def slow(_: DataConfig) -> tuple[Slow, None]:
    """A data set of one's own."""
    return Slow(), None


def input_of(config: Config) -> dict[str, Any]:
    """The record of a short measurement."""
    return pipeline.measure(config.replace(device="cpu", workers=0), LocalWorld(), seconds=0.1, repetitions=2)


def test_a_slow_data_set_is_what_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own items are one stage."""
    monkeypatch.setattr(pipeline, "WARM_UP_S", 0.0)
    config = recipes.get("digits").replace(data=f"{__name__}:slow", global_batch_size=2)
    assert input_of(config)["limited_by"] == "items"


def test_stages_of_images_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, their random change and what the device does are told apart, and add up to the pipeline's own time."""
    monkeypatch.setattr(pipeline, "WARM_UP_S", 0.0)
    found = input_of(recipes.get("digits"))
    assert {stage["stage"] for stage in found["stages"]} == {"read", "augment", "prepare"}
    assert found["images_per_second"] > 0
    assert "<- limits" in pipeline.table(found)


def test_stages_do_not_change_images(tmp_path: Path) -> None:
    """Whoever watches gets the batches that a training gets."""
    config = recipes.get("digits").replace(device="cpu")
    seen: list[str] = []
    watched, plain = (pipeline.build(config, LocalWorld().place) for _ in range(2))
    watched.train_loader.watch(seen.append)
    pairs = zip(*(pipeline._batches(parts, config, LocalWorld().place) for parts in (watched, plain)), strict=True)
    ours, theirs = next(pairs)
    for mine, other in zip(ours.micro_batches, theirs.micro_batches, strict=True):
        assert torch.equal(mine.inputs, other.inputs)
        assert isinstance(mine.inputs, Tensor)
    assert seen
