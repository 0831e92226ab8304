"""What `hvd-train bench` works out from what it has measured, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from hvd_train import recipes
from hvd_train.bench import allreduce, pipeline, record, scaling, throughput
from hvd_train.bench.plots import plots
from hvd_train.bench.scaling import Row, Size
from hvd_train.config import Config
from hvd_train.errors import UsageError
from hvd_train.progress.clock import PHASES
from hvd_train.report import drawing
from hvd_train.run_files import durable
from hvd_train.settings.data import DataConfig
from hvd_train.world.world import LocalWorld
from tests.support.runs import small_config


@pytest.mark.parametrize("count", [2, 3, 5, 20, 21, 22, 60])
def test_the_interval_is_student_s(count: int) -> None:
    """As scipy has it, for few repetitions and for many."""
    values = [float(number * number % 7) for number in range(count)]
    found = record.estimate(values)
    low, high = stats.t.interval(0.95, count - 1, found.mean, stats.sem(values))
    assert 2 * found.half_width == pytest.approx(high - low, rel=3e-3)


def test_one_repetition_has_no_interval() -> None:
    """It says nothing of how much repetitions scatter; JSON has null there, not NaN."""
    assert record.estimate([3.0]).interval is None


@pytest.mark.parametrize(
    ("value", "text"), [(1234.5, "1,234"), (12.345, "12.3"), (0.00123456, "0.00123"), (0.0, "0"), (1.0, "1.00")]
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    """A bandwidth of a few KB/s is not written as 0.000 GB/s."""
    assert record.written(value) == text


def test_bandwidths_are_those_of_nccl_tests() -> None:
    """4 MiB in a millisecond on 4 ranks: 4.19 GB/s of algorithm, and 2 x 3/4 times that on the bus."""
    row = allreduce.Timed("fp32", 2**22, record.Estimate(1000.0, 0.0), ranks=4).as_dict()
    assert row["algorithm_gb_per_second"] == pytest.approx(4.194304)
    assert row["bus_gb_per_second"] == pytest.approx(4.194304 * 1.5)


def test_sizes_of_sums() -> None:
    """From one size to the other, times four."""
    assert allreduce.sizes("1KB", "65kb") == [1024, 4096, 16384, 65536]
    assert allreduce.sizes("8", "8") == [8]
    assert len(allreduce.sizes("1KB", "256MB")) == 10


@pytest.mark.parametrize("text", ["", "0", "3", "-4", "1.5MB", "x", "4TB", "²KB"])
def test_what_is_no_size(text: str) -> None:
    """Anything but a number of bytes that whole fp32 numbers fill is refused by its flag."""
    with pytest.raises(UsageError, match="--max-size"):
        allreduce.sizes("4", text)


def test_only_a_record_of_the_same_tool_is_replaced() -> None:
    """Whatever else a file holds is the user's."""
    path = Path("found.json")
    record.check_target(path, "input")
    for content in ("{}", "[1]", "no JSON", '{"bench": "allreduce"}', "\x00"):
        path.write_text(content)
        with pytest.raises(UsageError, match=r"found\.json"):
            record.check_target(path, "input")
        assert path.read_text() == content
    path.write_text('{"bench": "input"}')
    record.check_target(path, "input")


@pytest.mark.parametrize("path", ["missing/found.json", "."])
def test_a_record_has_a_place(path: str) -> None:
    """A folder that is not there, or a folder itself, is told before anything is measured."""
    with pytest.raises(UsageError, match="--json"):
        record.check_target(Path(path), "input")


@pytest.mark.parametrize(
    ("batch", "weak", "strong"),
    [
        ({"global_batch_size": 64}, {1: (64, None), 4: (256, None)}, {1: (64, None), 4: (64, None)}),
        ({"batch_size": 8, "global_batch_size": None}, {1: (None, 8), 4: (None, 8)}, {1: (8, None), 4: (8, None)}),
        (
            {"batch_size": 8, "global_batch_size": None, "accumulation_steps": 2},
            {4: (None, 8)},
            {4: (16, None)},
        ),
        ({"batch_size": 8, "global_batch_size": 64}, {4: (256, 8)}, {4: (64, 8)}),
    ],
)
def test_the_batch_grows_with_the_workers_or_stays(
    batch: dict[str, Any], weak: dict[int, Any], strong: dict[int, Any]
) -> None:
    """Weak scaling gives each worker what one alone takes, strong scaling all of them together."""
    config = recipes.get("digits").replace(**batch)
    for mode, expected in (("weak", weak), ("strong", strong)):
        for workers, (total, per_worker) in expected.items():
            found = scaling.sized(config, workers, mode).batch
            assert (found.global_batch_size, found.batch_size) == (total, per_worker), (mode, workers)


def test_efficiency_goes_by_the_smallest_size_that_ran() -> None:
    """Speed per worker over its; a size that failed has none and is no base."""
    rows = [Row(1, failed="why"), Row(2, images_per_second=100.0), Row(4, images_per_second=150.0), Row(8)]
    assert [row.efficiency for row in scaling.with_efficiency(rows)] == [None, 1.0, 0.75, None]
    assert scaling.with_efficiency([Row(1, failed="why")])[0].efficiency is None


def trained(speed: float, *lines: dict[str, Any], **summary: Any) -> Row:
    """The row of a run folder with these files."""
    folder = Path("np-2")
    folder.mkdir(exist_ok=True)
    start = {"kind": "event", "name": "start", "num_samples": 130}
    text = "".join(json.dumps(line) + "\n" for line in (start, *lines))
    durable.write_text(folder / "metrics.jsonl", text)
    known = {"images_per_second": speed, "test_loss": None, "test_top1": None, "best_top1": None}
    durable.write_text(folder / "summary.json", json.dumps({**known, **summary}))
    config = recipes.get("digits").replace(learning_rate=0.1, lr_scaling="linear", lr_base_batch=32)
    return scaling.row_of(Size(2, config, folder))


def epoch(val_loss: float | None, speed: float) -> dict[str, Any]:
    """A line of metrics."""
    return {"kind": "epoch", "val_loss": val_loss, "images_per_second": speed}


def test_the_row_of_a_training() -> None:
    """Best validation loss, test's own top-1 where there is a test set, and epochs by the clock of training."""
    row = trained(65.0, epoch(0.5, 60.0), epoch(0.4, 65.0), epoch(0.6, 65.0), test_loss=0.3, test_top1=0.9)
    assert row == Row(2, 0.2, 64, 3, 2.0, 65.0, None, 0.4, 0.3, 0.9)


def test_the_row_of_a_training_with_gaps() -> None:
    """No validation, or a last life with nothing left to do: the gap is a gap, the speed is the last one measured."""
    assert trained(0.0, epoch(None, 26.0), epoch(None, 0.0), best_top1=0.7) == Row(2, 0.2, 64, 3, 5.0, 26.0, top1=0.7)
    assert trained(0.0).images_per_second is None


def test_plots_of_whatever_rows() -> None:
    """All failed, one size only, gaps in the middle: still a picture of each."""
    for rows in (
        [Row(1, failed="why")],
        [Row(1, images_per_second=10.0, efficiency=1.0)],
        [Row(1, images_per_second=10.0, efficiency=1.0, epoch_seconds=1.0), Row(2, failed="why"), Row(4, top1=0.5)],
    ):
        for chart in plots([dataclasses.asdict(row) for row in rows], "weak").values():
            assert drawing.png(chart).startswith(b"\x89PNG")


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


def test_stages_do_not_change_images(tmp_path: Path) -> None:
    """Whoever watches gets the batches that a training gets."""
    config = recipes.get("digits").replace(device="cpu")
    seen: list[str] = []
    watched, plain = (pipeline.build(config, LocalWorld().place, None, None) for _ in range(2))
    watched.train_loader.watch(seen.append)
    pairs = zip(*(pipeline._batches(parts, config, LocalWorld().place) for parts in (watched, plain)), strict=True)
    ours, theirs = next(pairs)
    for mine, other in zip(ours.micro_batches, theirs.micro_batches, strict=True):
        assert torch.equal(mine.inputs, other.inputs)
        assert isinstance(mine.inputs, Tensor)
    assert seen
