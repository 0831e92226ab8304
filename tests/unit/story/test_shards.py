"""Trainings on shards."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hvd_train.config import DataConfig
from hvd_train.data.shards import Shards
from hvd_train.errors import UsageError
from hvd_train.run_files.ledger import audit
from hvd_train.world.world import LocalWorld
from tests.support.elastic import TOLERANCE
from tests.support.runs import (
    NUM_SAMPLES,
    few_digits,
    largest_difference,
    small_config,
    trained,
    trained_on_changing_ranks,
)
from tests.support.shards import write_samples
from tests.support.worlds import StoppingWorld

SIZES = (1, 40, 0, 7, 60, 30, 2, 50)  # of shards


def as_image(sample: dict[str, Any]) -> tuple[Tensor, int]:
    image = torch.frombuffer(bytearray(sample["raw"]), dtype=torch.uint8)
    return image.view(1, 8, 8).float() / 255, int(sample["cls"])


def digits_in(folder: Path) -> Callable[[DataConfig], Any]:
    """Write the digits as shards, and return a function that opens them at a URL."""
    data = few_digits(DataConfig()).train
    numbers = iter(range(NUM_SAMPLES))
    for shard, size in enumerate(SIZES):
        samples = [
            {"raw": data.images[number].numpy().tobytes(), "cls": b"%d" % data.labels[number]}
            for number in itertools.islice(numbers, size)
        ]
        write_samples(folder / f"{shard}.tar", samples)

    def open_shards(config: DataConfig) -> Any:
        shards = Shards(f"shaky://{folder.absolute()}", as_image, cache=folder / "copies")
        shards.classes = tuple("0123456789")
        return shards, few_digits(config).val

    return open_shards


PER_WORKER = {"global_batch_size": None, "on_resize": "per-worker", "lr_scaling": "linear"}


@pytest.mark.parametrize("changes", [{}, PER_WORKER], ids=["global", "per worker"])
def test_a_run_on_shards_is_exact_on_changing_ranks(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """Each sample counts once an epoch, also if steps become larger and smaller; of equal
    steps, the weights are those of one undisturbed rank.
    """
    data = digits_in(tmp_path / "shards")
    settings = {"epochs": 3, "shuffle_window": 20, "ledger": True, **changes}
    config = small_config(commit_steps=2, **settings)
    ended = trained_on_changing_ranks(config, data)
    found = audit(Path("run"))
    assert (found.faults, found.epochs, found.world_sizes) == ((), 3, (1, 2, 3))
    if not changes:
        alone = config.replace(output_dir=Path("alone"))
        _, expected = trained(LocalWorld(), alone, data=data)
        assert all(largest_difference(weights, expected) < TOLERANCE for _, weights in ended)


def test_another_order_or_set_is_refused(tmp_path: Path) -> None:
    """Else samples of the epoch would come twice or never."""
    data = digits_in(tmp_path / "shards")
    config = small_config(epochs=1, commit_steps=2)
    trained(StoppingWorld(after=3), config, data=data)
    with pytest.raises(UsageError, match="shuffle_window"):
        trained(LocalWorld(), config.replace(shuffle_window=20), data=data)
    (tmp_path / "shards" / "0.tar").rename(tmp_path / "shards" / "9.tar")
    with pytest.raises(UsageError, match=r"order of samples|training set"):
        trained(LocalWorld(), config, data=data)
