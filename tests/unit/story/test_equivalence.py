"""The invariants of training, on one rank and on ranks that are threads."""

import contextlib
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hvd_train import Config
from hvd_train.checkpoint import newest_good
from hvd_train.progress.order import BatchLayout, EpochOrder, assignments
from hvd_train.progress.shares import Shares, Speed
from hvd_train.world.world import LocalWorld, PendingSum
from tests.support import runs
from tests.support.launching import json_lines
from tests.support.runs import equal, small_config, trained
from tests.support.worlds import Killed, StoppingWorld, ThreadWorld, run_ranks


def test_a_resumed_run_keeps_its_batch_layout() -> None:
    """Also on other numbers of ranks, for which the same settings would make another layout."""
    config = small_config(epochs=2, global_batch_size=None, batch_size=5, accumulation_steps=2)

    def stopped(world: ThreadWorld) -> int:
        world.requested = lambda *, got_signal=False: "stop"
        return trained(world, config)[0].steps

    assert run_ranks(2, stopped) == [1, 1]
    assert run_ranks(3, stopped) == [2, 2, 2]
    assert run_ranks(1, lambda world: trained(world, config)[0].finished) == [True]
    assert BatchLayout(**newest_good(Path("run"), pytest.fail)["layout"]) == BatchLayout(20, 5)


SGD = {"optimizer": "sgd", "nesterov": True}
ADAMW = {"optimizer": "adamw", "learning_rate": 0.01, "nesterov": False}
KINDS = {
    "sgd": (SGD, runs.convnet, runs.few_digits),
    "dropout": (ADAMW, runs.dropout, runs.few_digits),
    "buffers": (SGD, runs.remembers, runs.few_digits),
    "map-style, batch norm": (ADAMW, runs.batch_norm, runs.mapped_digits),
}


class CrashingWorld(LocalWorld):
    """A world of one that dies in a later step."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._left = at

    def start_sum(self, tensor: Tensor, name: str) -> PendingSum:
        self._left -= name == "step"
        if self._left == 0:
            raise Killed
        return super().start_sum(tensor, name)


def check_finishes_as_undisturbed(config: Config, make: Any, data: Any) -> None:
    """Assert that a run which resumes ends as one that was never stopped: its results,
    weights and records.
    """
    undisturbed, expected = trained(
        LocalWorld(), config.replace(output_dir=Path("undisturbed")), make, data
    )
    assert not Path("run/summary.json").exists()
    result, weights = trained(LocalWorld(), config, make, data)
    assert equal(weights, expected)
    same = ("finished", "steps", "epochs", "scores", "best", "best_epoch")
    assert [getattr(result, name) for name in same] == [getattr(undisturbed, name) for name in same]
    assert written(Path("run")) == written(Path("undisturbed"))
    for name in ("model-final.pt", "model-best.pt"):
        saved = (torch.load(Path(folder) / name) for folder in ("run", "undisturbed"))
        assert equal(*saved)


@pytest.mark.parametrize(
    ("kind", "ends"),  # steps from one end to the next; an epoch has 10, and a commit is after 5
    [
        ("sgd", [StoppingWorld(20), StoppingWorld(3), StoppingWorld(4)]),
        ("dropout", [StoppingWorld(7)]),
        ("buffers", [StoppingWorld(13), StoppingWorld(4)]),
        ("map-style, batch norm", [StoppingWorld(15)]),
        ("sgd", [CrashingWorld(11)]),
    ],
)
def test_resume_is_bit_identical(kind: str, ends: list[LocalWorld]) -> None:
    """Also if the process died between two commits."""
    settings, make, data = KINDS[kind]
    config = small_config(epochs=3, commit_steps=5, **settings)
    for world in ends:
        with contextlib.suppress(Killed):
            trained(world, config, make, data)
    check_finishes_as_undisturbed(config, make, data)


@pytest.mark.parametrize(("before", "steps"), [(12, 13), (20, 20)])
def test_a_longer_time_continues_to_the_bit(before: int, steps: int) -> None:
    """Time was up within an epoch, or at its end."""
    config = small_config(epochs=3)
    trained(StoppingWorld(before), config)
    result, _ = trained(LocalWorld(), config.replace(max_time="0.001s"))
    assert (result.finished, result.steps, result.epochs) == (True, steps, steps // 10)
    Path("run/summary.json").unlink()
    check_finishes_as_undisturbed(config.replace(max_time="2h"), runs.convnet, runs.few_digits)


def written(folder: Path) -> list[dict[str, object]]:
    """Return the steps and epochs in metrics.jsonl, without times."""
    lines = json_lines(folder / "metrics.jsonl")
    clock = {"time", "samples_per_second", "seconds", "total_seconds", "peak_memory_gib", "split"}
    return [
        {name: line[name] for name in line.keys() - clock}
        for line in lines
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
    fewest = 1 if alone else 2
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
        before = cursor
        for parts in zip(*ranks, strict=True):
            micros = [micro for part in parts for micro in part.micro_batches]
            assert sorted(micro.number for micro in micros) == list(
                range(parts[0].num_micro_batches)
            )
            assert {part.size for part in parts} == {sum(len(micro.samples) for micro in micros)}
            assert all(
                fewest <= len(micro.samples) < layout.micro_batch + fewest for micro in micros
            )
            micros.sort(key=lambda micro: micro.number)
            sizes.append([len(micro.samples) for micro in micros])
            taken += [int(index) for micro in micros for index in micro.samples]
            cursor += parts[0].size
        assert cursor > before, f"no step takes the samples since {before}"
    if not per_worker:
        steps_of_one = assignments(epoch_order, 0, layout, 0, 1)
        assert sizes == [
            [len(micro.samples) for micro in step.micro_batches] for step in steps_of_one
        ]
        assert len(sizes) == len(layout.batches(range(num_samples)))
    assert taken == epoch_order[:].tolist()
    assert sorted(taken) == list(range(num_samples))


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
    results = []
    for size in (1, 3):
        folder = Path(f"on-{size}")
        of_ranks = run_ranks(
            size, lambda world, to=folder: trained(world, config.replace(output_dir=to), make)
        )
        lines = [
            {name: value for name, value in line.items() if name != "world_size"}
            for line in written(folder)
        ]
        results.append((of_ranks[0], lines))
    (alone, weights), lines = results[0]
    for (result, others), other_lines in results[1:]:
        assert equal(others, weights)
        assert result.scores == alone.scores
        assert other_lines == lines
