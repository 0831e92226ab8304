"""The invariants of training, on one rank and on ranks that are threads."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_train import Config
from hvd_train.checkpoint import newest_good
from hvd_train.progress.order import BatchLayout, EpochOrder, assignments
from hvd_train.progress.shares import Shares, Speed
from hvd_train.world.world import LocalWorld
from tests.support import runs
from tests.support.launching import json_lines
from tests.support.runs import equal, small_config, trained
from tests.support.worlds import Fault, StoppingWorld, run_ranks


def test_a_resumed_run_keeps_its_batch_layout() -> None:
    """Also on other numbers of ranks, for which the same settings would make another layout."""
    config = small_config(epochs=2, global_batch_size=None, batch_size=5, accumulation_steps=2)

    def stopped(world):
        world.requested = lambda *, got_signal=False: "stop"
        return trained(world, config)[0].steps

    assert run_ranks(2, stopped) == [1, 1]
    assert run_ranks(3, stopped) == [2, 2, 2]
    assert run_ranks(1, lambda world: trained(world, config)[0].finished) == [True]
    assert BatchLayout(**newest_good(Path("run"), pytest.fail)["layout"]) == BatchLayout(20, 5)


SGD = {"optimizer": "sgd", "nesterov": True}
ADAMW = {"optimizer": "adamw", "learning_rate": 0.01, "nesterov": False}


def check_finishes_as_undisturbed(config: Config, **own: Any) -> None:
    """Assert that a run which resumes ends as one that was never stopped: its results,
    weights and records.
    """
    undisturbed, expected = trained(
        LocalWorld(), config.replace(output_dir=Path("undisturbed")), **own
    )
    assert not Path("run/summary.json").exists()
    result, weights = trained(LocalWorld(), config, **own)
    assert equal(weights, expected)
    for name in ("finished", "steps", "epochs", "scores", "best", "best_epoch"):
        assert getattr(result, name) == getattr(undisturbed, name)
    assert written(Path("run")) == written(Path("undisturbed"))
    for name in ("model-final.pt", "model-best.pt"):
        assert equal(*(torch.load(Path(folder, name)) for folder in ("run", "undisturbed")))


@pytest.mark.parametrize(
    ("settings", "own", "stops"),  # in steps from one to the next; an epoch has 10
    [
        (SGD, {}, [20, 3, 4]),
        (ADAMW, {"make": runs.dropout}, [7]),
        (SGD, {"make": runs.remembers}, [13, 4]),
        (ADAMW, {"make": runs.batch_norm, "data": runs.mapped_digits}, [15]),
    ],
    ids=["sgd", "dropout", "buffers", "map-style, batch norm"],
)
def test_resume_is_bit_identical(
    settings: dict[str, Any], own: dict[str, Any], stops: list[int]
) -> None:
    config = small_config(epochs=3, commit_steps=5, **settings)
    for after in stops:
        trained(StoppingWorld(after), config, **own)
    check_finishes_as_undisturbed(config, **own)


def test_resume_from_an_earlier_commit_is_bit_identical() -> None:
    """If the process died between two commits."""
    config = small_config(epochs=3, commit_steps=5)
    run_ranks(1, lambda world: trained(world, config), [Fault(0, step=13)])
    check_finishes_as_undisturbed(config)


@pytest.mark.parametrize(("before", "steps"), [(12, 13), (20, 20)])
def test_a_longer_time_continues_to_the_bit(before: int, steps: int) -> None:
    """Time was up within an epoch, or at its end."""
    config = small_config(epochs=3)
    trained(StoppingWorld(before), config)
    result, _ = trained(LocalWorld(), config.replace(max_time="0.001s"))
    assert (result.finished, result.steps, result.epochs) == (True, steps, steps // 10)
    Path("run/summary.json").unlink()
    check_finishes_as_undisturbed(config.replace(max_time="2h"))


def written(folder: Path) -> list[dict[str, object]]:
    """Return the steps and epochs in metrics.jsonl, without times and numbers of ranks."""
    varies = ("time", "samples_per_second", "seconds", "total_seconds", "peak_memory_gib", "split")
    return [
        {name: line[name] for name in line.keys() - {*varies, "world_size"}}
        for line in json_lines(folder / "metrics.jsonl")
        if line["kind"] != "event"
    ]


@given(data=st.data())
def test_each_sample_counts_once(data: st.DataObject) -> None:
    """Through any resizes each sample of an epoch counts once, and not alone in a
    micro-batch (batch norm).
    """
    num_samples = data.draw(st.integers(1, 120), label="samples")
    layout = BatchLayout(
        data.draw(st.integers(1, num_samples), label="global batch"), data.draw(st.integers(1, 50))
    )
    per_worker = data.draw(st.booleans(), label="per worker")
    alone = 1 in (num_samples, layout.micro_batch) or (layout.global_batch == 1 and not per_worker)
    fewest = 2 - alone
    epoch_order = EpochOrder(
        data.draw(st.integers(0, 2**63 - 1)), data.draw(st.integers(0, 99)), num_samples
    )
    cursor = 0
    taken = []
    sizes = []
    while cursor < num_samples:
        size = data.draw(st.integers(1, 6), label="world size")
        if per_worker:
            layout = BatchLayout(min(layout.micro_batch * size, num_samples), layout.micro_batch)
        steps = data.draw(st.integers(1, 8), label="steps until it changes")
        shares = [Shares(size, rank, follow_speed=True) for rank in range(size)]
        if data.draw(st.booleans(), label="other shares"):
            seconds = data.draw(st.lists(st.floats(0.1, 9), min_size=size, max_size=size))
            begins = data.draw(st.integers(0, 8), label="steps until then")
            for of_rank in shares:
                of_rank.change([Speed(0.0, each) for each in seconds], begins)
        ranks = [
            islice(
                assignments(epoch_order, cursor, layout, rank, size, owned=shares[rank].owned),
                steps,
            )
            for rank in range(size)
        ]
        for parts in zip(*ranks, strict=True):
            micros = [micro for part in parts for micro in part.micro_batches]
            micros.sort(key=lambda micro: micro.number)
            assert [micro.number for micro in micros] == [*range(parts[0].num_micro_batches)]
            sizes.append([len(micro.samples) for micro in micros])
            assert {part.size for part in parts} == {sum(sizes[-1])}
            assert all(fewest <= size < layout.micro_batch + fewest for size in sizes[-1])
            taken += [int(index) for micro in micros for index in micro.samples]
            cursor += parts[0].size
    if not per_worker:
        assert sizes == [
            [len(micro.samples) for micro in step.micro_batches]
            for step in assignments(epoch_order, 0, layout, 0, 1)
        ]
        assert len(sizes) == len(layout.batches(range(num_samples)))
    assert taken == epoch_order[:].tolist()
    assert sorted(taken) == [*range(num_samples)]


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (runs.convnet, {"clip_norm": 0.5, "ema_decay": 0.9}),
        (runs.batch_norm, {**ADAMW, "drop_last": True}),
        (runs.remembers, {"balance": "on", "recheck_steps": 3}),
    ],
)
def test_exact_sums_give_the_same_bits_on_any_ranks(make: Any, settings: dict[str, object]) -> None:
    """Weights, buffers, scores, records and digests of states."""
    config = small_config(epochs=2, reduction="exact", ledger=True, **settings)

    def on(size):
        to = config.replace(output_dir=Path(f"on-{size}"))
        result, weights = run_ranks(size, lambda world: trained(world, to, make))[0]
        return weights, (result.scores, written(to.run.output_dir))

    weights, records = on(1)
    others, of_others = on(3)
    assert equal(others, weights)
    assert of_others == records
