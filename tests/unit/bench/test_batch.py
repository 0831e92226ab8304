"""The search for the largest and the fastest batch, with the real step."""

from __future__ import annotations

import json

import pytest
from torch import nn

from hvd_train.bench import batch, batch_memory, batch_search
from hvd_train.bench.batch_search import Row
from hvd_train.bench.record import Record
from hvd_train.config import Config
from hvd_train.errors import OutOfMemory, UsageError
from hvd_train.world.world import LocalWorld
from tests.support.documented import missing
from tests.support.runs import small_config

GREEDY = "tests.support.greedy:network"


@pytest.fixture(autouse=True)
def _no_speed_is_too_low(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the speeds of so few steps scatter, and would end a search."""
    monkeypatch.setattr(batch_search, "FALLEN", 0.0)


def searched(config: Config, first: int = 2, last: int = 8) -> tuple[list[Row], Record | None]:
    """Return the rows in the order of the search, and its record."""
    found = list(
        batch.measure(
            config.replace(device="cpu", data="digits"),
            LocalWorld(),
            first=first,
            last=last,
            seconds=0.002,
            repetitions=1,
        )
    )
    return [row for row, _ in found], found[-1][1] if found else None


def test_a_search_to_the_limit() -> None:
    """Every size has its numbers, and the record all that the page explains."""
    rows, record = searched(small_config(), last=8)
    assert [row.batch_size for row in rows] == [2, 4, 8]
    assert record is not None
    assert missing({"bench": "batch", **record}) == set()
    json.dumps(record, allow_nan=False)
    for row in record["rows"]:
        assert row["images_per_second"] * row["seconds_per_step"] == pytest.approx(row["batch_size"], rel=0.01)
        assert row["peak_memory"] > 10**7
        assert row["tflops_per_worker"] > 0
    assert max(row["share"] for row in record["rows"]) == 1.0
    assert record["gflop_per_image"] > 0
    assert (record["ended_by"], record["largest_that_fits"]) == ("limit", None)
    text = batch.table(record)
    assert "all up to batch 8: more were not tried (--to 8)" in text
    verdict = "is large enough" if record["large_enough"] < 8 else "is the fastest of these; larger ones may be faster"
    assert f"batch {record['large_enough']} {verdict}" in text
    assert "type --batch-size" in text


def test_a_data_set_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes no sample twice, so no batch is larger than the training set."""
    monkeypatch.setenv("GREEDY", "nothing:0")
    rows, record = searched(small_config(model=GREEDY), first=1024, last=9000)
    assert record is not None
    assert [row.batch_size for row in rows] == [1024, 1437]
    assert record["ended_by"] == "data"


def test_memory_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest that fits is found, and the sizes that do not are rows with the reason."""
    monkeypatch.setenv("GREEDY", "above-13:0")
    rows, record = searched(small_config(model=GREEDY), last=64)
    assert [row.batch_size for row in rows] == [2, 4, 8, 16, 12, 14, 13]
    assert record is not None
    assert (record["ended_by"], record["largest_that_fits"]) == ("memory", 13)
    assert {row["batch_size"]: row["failed"] for row in record["rows"] if row["failed"]} == {
        14: "out of memory",
        16: "out of memory",
    }
    assert "the largest that fits: batch 13 (14 does not)" in batch.table(record)


def test_a_step_without_memory_after_a_pass_that_had_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, that size does not fit, and the search goes on."""
    taken = batch.Training.timed

    def timed(training: batch.Training, steps: int) -> object:
        if training.state.cut.micro_batch > 4:
            raise OutOfMemory("out of memory")
        return taken(training, steps)

    monkeypatch.setattr(batch.Training, "timed", timed)
    rows, record = searched(small_config(), last=8)
    assert [(row.batch_size, row.failed) for row in rows] == [
        *((2, None), (4, None), (8, "out of memory"), (6, "out of memory"), (5, "out of memory")),
    ]
    assert record is not None
    assert record["largest_that_fits"] == 4


def test_not_even_one_sample_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is out of memory, as in training."""
    monkeypatch.setenv("GREEDY", "above-0:0")
    with pytest.raises(OutOfMemory, match="out of memory with 4 samples in a pass, and with fewer"):
        searched(small_config(model=GREEDY), first=4)


def test_a_host_without_memory_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    """By arithmetic, before the size is tried; the row says how much it would take."""
    monkeypatch.setattr(
        batch_memory, "predicted_peak", lambda resident, peaks, size: 1e15 if size > 4 else resident - 1e15
    )
    rows, record = searched(small_config(), last=64)
    assert [row.batch_size for row in rows] == [2, 4, 8, 6, 5]
    assert all("not tried: it would take about" in (row.failed or "") for row in rows[2:])
    assert record is not None
    assert "the largest that fits: batch 4 (5 does not)" in batch.table(record)


def normalised(num_classes: int) -> nn.Module:
    """Return a network that cannot be trained on one sample."""
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, num_classes))


def test_one_sample_is_too_few_for_batch_norm() -> None:
    """One line says which size to begin with."""
    with pytest.raises(UsageError, match=r"one sample in a pass is too few for this model .*: type --from 2"):
        searched(small_config(model="tests.unit.bench.test_batch:normalised"), first=1)


def test_a_model_that_cannot_be_counted_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table says why there is no number of operations."""
    monkeypatch.setattr("hvd_train.bench.throughput.operations_of", lambda trial: 1 / 0)
    _, record = searched(small_config(), last=4)
    assert record is not None
    assert "FLOPs: not counted: ZeroDivisionError" in batch.table(record)
