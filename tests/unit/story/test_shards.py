"""Trainings on shards."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hvd_train.config import Config, DataConfig
from hvd_train.data.shards import Shards
from hvd_train.errors import UsageError
from hvd_train.run_files.ledger import audit
from hvd_train.world.world import LocalWorld
from tests.support.elastic import TOLERANCE
from tests.support.runs import few_digits, largest_difference, small_config, trained
from tests.support.shards import write_samples
from tests.support.worlds import StoppingWorld, ThreadWorld, run_ranks

SIZES = (1, 40, 0, 7, 60, 30, 2, 50)  # of shards


def as_image(sample: dict[str, Any]) -> tuple[Tensor, int]:
    image = torch.frombuffer(bytearray(sample["raw"]), dtype=torch.uint8)
    return image.view(1, 8, 8).float() / 255, int(sample["cls"])


def digits_in(folder: Path) -> Callable[[DataConfig], Any]:
    """Write the digits as shards, and return a function that opens them at a URL."""
    data: Any = few_digits(DataConfig()).train
    ends = [*itertools.accumulate(SIZES)]
    for shard, (size, end) in enumerate(zip(SIZES, ends, strict=True)):
        samples = [
            {"raw": data.images[number].numpy().tobytes(), "cls": b"%d" % data.labels[number]}
            for number in range(end - size, end)
        ]
        write_samples(folder / f"{shard}.tar", samples)

    def open_shards(config: DataConfig) -> Any:
        shards: Any = Shards(f"shaky://{folder.absolute()}", as_image, cache=folder / "copies")
        shards.classes = tuple("0123456789")
        return shards, few_digits(config).val

    return open_shards


def stop_in_mid_epoch(config: Config, data: Any) -> Callable[[ThreadWorld], bool]:
    """Return what a rank does that is asked to stop in its fifth step."""

    def body(world: ThreadWorld) -> bool:
        asked = itertools.count(1)
        world.requested = lambda *, got_signal=False: "stop" if next(asked) == 5 else "train"
        return trained(world, config, data=data)[0].finished

    return body


def test_a_run_on_shards_is_exact_on_changing_ranks(tmp_path: Path) -> None:
    """Each sample counts once an epoch, and the weights are those of one undisturbed rank."""
    data = digits_in(tmp_path / "shards")
    settings = {"epochs": 3, "shuffle_window": 20, "ledger": True}
    alone = small_config(output_dir=Path("alone"), **settings)
    _, expected = trained(LocalWorld(), alone, data=data)
    config = small_config(commit_steps=2, **settings)
    trained(StoppingWorld(after=14), config, data=data)
    assert run_ranks(3, stop_in_mid_epoch(config, data)) == [False] * 3
    for result, weights in run_ranks(2, lambda world: trained(world, config, data=data)):
        assert result.finished
        assert largest_difference(weights, expected) < TOLERANCE
    found = audit(Path("run"))
    assert (found.faults, found.epochs, found.world_sizes) == ((), 3, (1, 2, 3))


def test_each_sample_counts_once_if_the_batch_follows_the_workers(tmp_path: Path) -> None:
    """The order of an epoch stays while steps become larger and smaller."""
    data = digits_in(tmp_path / "shards")
    changes = {
        "global_batch_size": None,
        "on_resize": "per-worker",
        "lr_scaling": "linear",
        "shuffle_window": 20,
    }
    config = small_config(epochs=2, ledger=True, commit_steps=1, **changes)
    assert run_ranks(3, stop_in_mid_epoch(config, data)) == [False] * 3
    trained(LocalWorld(), config, data=data)
    found = audit(Path("run"))
    assert (found.faults, found.epochs, found.world_sizes) == ((), 2, (1, 3))


@pytest.mark.parametrize("change", ["shuffle_window", "shards"])
def test_another_order_or_set_is_refused(change: str, tmp_path: Path) -> None:
    """Else samples of the epoch would come twice or never."""
    data = digits_in(tmp_path / "shards")
    config = small_config(epochs=1, commit_steps=2)
    trained(StoppingWorld(after=3), config, data=data)
    if change == "shuffle_window":
        config = config.replace(shuffle_window=20)
    else:
        (tmp_path / "shards" / "0.tar").rename(tmp_path / "shards" / "9.tar")
    with pytest.raises(UsageError, match=r"shuffle_window|order of samples|training set"):
        trained(LocalWorld(), config, data=data)
