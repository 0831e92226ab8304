"""`hvd-train bench`: the step, the sums between ranks, the input, and the records of all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scipy import stats

from hvd_train import recipes
from hvd_train.bench import allreduce, pipeline, record, throughput
from hvd_train.errors import UsageError
from hvd_train.progress.clock import PHASES
from hvd_train.world.world import LocalWorld
from tests.support.runs import small_config


def test_the_record_of_a_step() -> None:
    config = throughput.without_files(small_config(), own_data=False)
    found = throughput.measure(config, LocalWorld(), steps=2, repetitions=2)
    assert set(found["split"]) == set(PHASES)
    assert found["images_per_second"] == found["images_per_second_per_worker"] > 0
    assert len(found["images_per_second_of_repetitions"]) == 2
    json.dumps(found, allow_nan=False)


def test_random_images_take_the_place_of_files() -> None:
    """A recipe is measured without its files, with images of its size and without a download of weights."""
    for name, size in (("imagenet-resnet50", 224), ("cifar10-resnet50", 32)):
        config = throughput.without_files(recipes.get(name), own_data=False)
        assert (config.data.data, config.data.image_size, config.model.weights) == ("synthetic", size, None)
    assert throughput.without_files(recipes.get("digits"), own_data=True).data.data == "digits"


def test_bandwidths_are_those_of_nccl_tests() -> None:
    """4 MiB in a millisecond on 4 ranks: 4.19 GB/s of algorithm, and 2 x 3/4 times that on the bus."""
    row = allreduce.row_of("fp32", 2**22, [1000.0], ranks=4)
    assert row["algorithm_gb_per_second"] == pytest.approx(4.194304)
    assert row["bus_gb_per_second"] == pytest.approx(4.194304 * 1.5)


def test_sizes_of_sums() -> None:
    """Sizes grow by a factor of four; a text that is no number of bytes of whole fp32 numbers is refused."""
    assert allreduce.sizes("1KB", "65kb") == [1024, 4096, 16384, 65536]
    for text in ("", "0", "3", "1.5MB", "²KB"):
        with pytest.raises(UsageError, match="--max-size"):
            allreduce.sizes("4", text)


@pytest.mark.parametrize(
    ("workers", "cores", "limit"), [(0, 8, "decode"), (4, 8, "prepare"), (4, 1, "decode"), (1, 8, "decode")]
)
def test_which_stage_of_the_input_limits(workers: int, cores: int, limit: str) -> None:
    """Loader processes share their work, as far as there are cores for them."""
    assert pipeline.limiting({"read": 1.0, "decode": 5.0, "prepare": 2.0, "transfer": 1.0}, workers, cores) == limit


def test_stages_of_images_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading, augmenting and preparing are timed separately; the table marks the slowest."""
    monkeypatch.setattr(pipeline, "WARM_UP_S", 0.0)
    config = recipes.get("digits").replace(device="cpu", workers=0)
    found = pipeline.measure(config, LocalWorld(), seconds=0.1, repetitions=2)
    assert {stage["stage"] for stage in found["stages"]} == {"read", "augment", "prepare"}
    assert found["images_per_second"] > 0
    assert "<- limits" in pipeline.table(found)


@pytest.mark.parametrize("count", [2, 3, 22, 60])
def test_the_interval_is_student_s(count: int) -> None:
    """The interval agrees with scipy's for few and many repetitions; a single one has none."""
    values = [float(number * number % 7) for number in range(count)]
    mean, found = record.estimate(values)
    assert found == pytest.approx(stats.t.interval(0.95, count - 1, mean, stats.sem(values)), rel=3e-3, abs=3e-3)
    assert record.estimate([3.0]) == (3.0, None)


def test_only_a_record_of_the_same_tool_is_replaced() -> None:
    """Any other file, a folder, and a path in a missing folder are refused before the measurement."""
    path = Path("found.json")
    record.check_target(path, "input")
    for content in ("{}", "[1]", "no JSON", '{"bench": "allreduce"}', "\x00"):
        path.write_text(content)
        with pytest.raises(UsageError, match=r"found\.json"):
            record.check_target(path, "input")
        assert path.read_text() == content
    path.write_text('{"bench": "input"}')
    record.check_target(path, "input")
    for place in ("missing/found.json", "."):
        with pytest.raises(UsageError, match="--json"):
            record.check_target(Path(place), "input")
