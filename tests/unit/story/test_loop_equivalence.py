"""The invariants that define correctness, on one rank and on ranks that are threads."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hvd_train.checkpoint import newest_good
from hvd_train.data.array_loader import ArrayLoader
from hvd_train.data.dataset import Arrays, DataSet
from hvd_train.data.prepare import Prepare
from hvd_train.progress import order
from hvd_train.progress.order import Cut, EpochOrder, assignments
from hvd_train.validate import Scores, evaluate
from hvd_train.world.world import LocalWorld, PendingSum
from tests.support import runs
from tests.support.runs import equal, largest_difference, small_config, trained
from tests.support.tasks import meter_of_classes
from tests.support.worlds import Killed, StoppingWorld, ThreadWorld, own_generator, run_ranks

pytestmark = pytest.mark.numeric

TOLERANCE = 1e-5


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("make", [runs.convnet, runs.batch_norm, runs.remembers])
def test_ranks_and_one(make: Callable[[int], nn.Module], size: int) -> None:
    """N ranks take the same step as one rank with the same global batch."""
    config = small_config(clip_norm=5.0, label_smoothing=0.1)
    alone, expected = trained(LocalWorld(), config.replace(output_dir=Path("alone")), make)
    assert alone.steps == 50
    outcomes = run_ranks(size, lambda world: trained(world, config.replace(output_dir=Path("ranks")), make))
    (result, weights), *others = outcomes
    assert largest_difference(weights, expected) <= TOLERANCE
    assert all(equal(weights, other) for _, other in others), "ranks hold different bits"
    assert (result.steps, result.scores["top1"]) == (alone.steps, alone.scores["top1"])
    assert result.scores["loss"] == pytest.approx(alone.scores["loss"], abs=TOLERANCE)


def test_a_global_batch_alone_is_the_same_training_on_any_number_of_ranks() -> None:
    """From the first step on, with batch norm too: the slots come from the batch and not from the ranks."""
    config = small_config(global_batch_size=95, batch_size=None, epochs=1, learning_rate=0.1)
    weights, losses = [], []
    for size in (1, 2, 3):
        folder = Path(f"on-{size}")
        run = config.replace(output_dir=folder)
        ranks = run_ranks(size, lambda world, run=run: trained(world, run, runs.batch_norm))
        weights.append(ranks[0][1])
        losses.append([step["loss"] for step in written(folder) if step["kind"] == "step"])
    for other, loss in zip(weights[1:], losses[1:], strict=True):
        assert loss == pytest.approx(losses[0], abs=TOLERANCE)
        assert largest_difference(other, weights[0]) <= TOLERANCE


@pytest.mark.parametrize(
    ("batch", "cut"),
    [
        ({"global_batch_size": 20, "batch_size": 5, "accumulation_steps": 2}, Cut(20, 5)),
        ({"global_batch_size": None, "batch_size": 5, "accumulation_steps": 2}, Cut(20, 5)),
        ({"global_batch_size": None, "batch_size": 80}, Cut(160, 80)),
    ],
    ids=str,
)
def test_a_run_that_goes_on_keeps_its_cut(batch: dict[str, int | None], cut: Cut) -> None:
    """On other numbers of ranks too, on which the same settings would make another global batch, or one too large."""
    config = small_config(epochs=2, **batch)

    def stopped(world: ThreadWorld) -> int:
        world.requested = lambda *, told_to_end=False: "stop"  # type: ignore[method-assign]
        return trained(world, config)[0].steps

    assert run_ranks(2, stopped) == [1, 1]
    assert run_ranks(3, stopped) == [2, 2, 2]
    assert run_ranks(1, lambda world: trained(world, config)[0].finished) == [True]
    last = newest_good(Path("run"), pytest.fail)
    assert last is not None
    assert Cut(**last["cut"]) == cut


def test_accumulation_and_one_large_batch() -> None:
    """Many small forward passes make the same step as one large one, for a model without batch statistics."""
    whole = small_config(batch_size=20, output_dir=Path("whole"))
    _, expected = trained(LocalWorld(), whole)
    _, weights = trained(LocalWorld(), whole.replace(batch_size=3, output_dir=Path("parts")))
    assert largest_difference(weights, expected) <= TOLERANCE


SGD = {"optimizer": "sgd", "nesterov": True}
ADAMW = {"optimizer": "adamw", "learning_rate": 0.01, "nesterov": False}
KINDS = {
    "sgd": (SGD, runs.convnet, runs.few_digits),
    "adamw": (ADAMW, runs.convnet, runs.few_digits),
    "batch-norm": (SGD, runs.batch_norm, runs.few_digits),
    "dropout": (ADAMW, runs.dropout, runs.few_digits),
    "buffers": (SGD, runs.remembers, runs.few_digits),
    "map-style": (SGD, runs.convnet, runs.mapped_digits),
    "map-style, batch norm": (ADAMW, runs.batch_norm, runs.mapped_digits),
}
# Steps from one stop to the next. An epoch has 10: at its first and last step, in the middle, more than once.
STOPS = {"sgd": [(1,), (7,), (10,), (20, 3, 4, 2), (30,)], "map-style": [(4,), (10, 5)]}


@pytest.mark.parametrize(("kind", "stops"), [(k, s) for k in KINDS for s in STOPS.get(k, [(13, 4)])])
def test_stopped_and_resumed(kind: str, stops: tuple[int, ...]) -> None:
    """A run stopped anywhere and resumed is bit-identical to one never stopped."""
    settings, make, data = KINDS[kind]
    config = small_config(epochs=3, **settings)
    undisturbed, expected = trained(LocalWorld(), config.replace(output_dir=Path("undisturbed")), make, data)
    config = config.replace(output_dir=Path("stopped"))
    done = 0
    for stop in stops:
        done += stop
        result, _ = trained(StoppingWorld(after=stop), config, make, data)
        assert (result.finished, result.steps) == (False, done)
    result, weights = trained(LocalWorld(), config, make, data)
    assert result.finished
    assert equal(weights, expected)
    same = ("steps", "epochs", "scores", "best", "best_epoch")
    assert [getattr(result, name) for name in same] == [getattr(undisturbed, name) for name in same]
    assert written(Path("stopped")) == written(Path("undisturbed"))
    for name in ("model-final.pt", "model-best.pt"):
        assert equal(*(torch.load(Path(folder) / name, weights_only=True) for folder in ("stopped", "undisturbed")))


class CrashingWorld(LocalWorld):
    """The world of one in which this process dies in step number `step` of its life."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._left = step

    def start_sum(self, tensor: Tensor, name: str) -> PendingSum:
        """The tensor as it is, or the end."""
        if name == "step":
            self._left -= 1
            if self._left == 0:
                raise Killed
        return super().start_sum(tensor, name)


@pytest.mark.parametrize("crash", [8, 11, 20, 29])
def test_crashed_and_resumed(crash: int) -> None:
    """A run that died between two commits and goes on from the last one is bit-identical, and so is its journal."""
    config = small_config(epochs=3, commit_steps=5)
    _, expected = trained(LocalWorld(), config.replace(output_dir=Path("undisturbed")))
    with contextlib.suppress(Killed):
        trained(CrashingWorld(crash), config)
    result, weights = trained(LocalWorld(), config)
    assert result.finished
    assert equal(weights, expected)
    assert written(Path("run")) == written(Path("undisturbed"))


def written(folder: Path) -> list[dict[str, object]]:
    """The steps and epochs in metrics.jsonl, without what depends on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clock = ("time", "images_per_second", "split", "ranks", "seconds", "usage")
    return [{k: v for k, v in line.items() if k not in clock} for line in lines if line["kind"] != "event"]


@given(data=st.data())
def test_each_sample_once(data: st.DataObject) -> None:
    """Under any sequence of resizes each sample of an epoch counts exactly once."""
    num_samples = data.draw(st.integers(1, 120), label="samples")
    cut = Cut(data.draw(st.integers(1, num_samples), label="global batch"), data.draw(st.integers(1, 50)))
    epoch_order = EpochOrder(data.draw(st.integers(0, 2**63 - 1)), data.draw(st.integers(0, 99)), num_samples)
    cursor, taken = 0, []
    while cursor < num_samples:
        size = data.draw(st.integers(1, 6), label="world size")
        steps = data.draw(st.integers(1, 8), label="steps until it changes")
        ranks = [islice(assignments(epoch_order, cursor, cut, rank, size), steps) for rank in range(size)]
        before = cursor
        for parts in zip(*ranks, strict=True):
            slots = [slot for part in parts for slot in part.slots]
            assert sorted(slot.number for slot in slots) == list(range(parts[0].num_slots))
            assert {part.size for part in parts} == {sum(len(slot.indices) for slot in slots)}
            assert all(1 <= len(slot.indices) <= cut.micro_batch for slot in slots)
            taken += [int(index) for slot in slots for index in slot.indices]
            cursor += parts[0].size
        assert cursor > before, f"no step takes the samples from {before} on"
    assert sorted(taken) == list(range(num_samples))
    assert np.array_equal(np.sort(epoch_order[:]), np.arange(num_samples))


@given(
    num_samples=st.integers(1, 300),
    batch=st.integers(1, 64),
    micro=st.integers(1, 20),
    size=st.integers(1, 5),
)
def test_same_slots(num_samples: int, batch: int, micro: int, size: int) -> None:
    """The slots of a step hold the same samples in the same order for every world size."""
    epoch_order, cut = EpochOrder(1, 2, num_samples), Cut(batch, micro)

    def slots(size: int) -> dict[tuple[int, int], list[int]]:
        ranks = [assignments(epoch_order, 0, cut, rank, size) for rank in range(size)]
        steps = enumerate(zip(*ranks, strict=True))
        return {(n, s.number): s.indices.tolist() for n, parts in steps for part in parts for s in part.slots}

    assert slots(size) == slots(1)
    assert len(slots(1)) >= math.ceil(num_samples / batch)


@pytest.mark.parametrize("count", [1, 37, 64])
def test_evaluation(count: int) -> None:
    """Evaluation gives the same number for every world size."""
    few = runs.few_digits(small_config().data)
    assert isinstance(few.val, Arrays)
    val = Arrays(few.val.inputs, few.val.targets, count)
    data = DataSet(few.train, val, few.classes, 1, 8, few.mean, few.std)
    device = torch.device("cpu")

    def scores(world: LocalWorld | ThreadWorld) -> Scores:
        prepare = Prepare(data, device, image_size=None, augment=None, colour=False)
        loader = ArrayLoader(val, prepare, device, seed=0)
        model = own_generator(runs.batch_norm(10))
        meter = meter_of_classes(data.classes)
        return evaluate(
            model, loader, world, micro_batch=5, meter=meter, device=device, autocast=contextlib.nullcontext()
        )

    alone = scores(LocalWorld())
    for size in (1, 2, 3, 4):
        for each in run_ranks(size, scores):
            assert (each.count, each["top1"], each["top5"]) == (alone.count, alone["top1"], alone["top5"])
            assert each["loss"] == pytest.approx(alone["loss"], rel=1e-12)
            np.testing.assert_equal(each.per_class, alone.per_class)
    assert alone.count == count


def test_random_numbers_belong_to_the_sample() -> None:
    """A sample is augmented the same way whatever batch, position or rank it comes in."""
    rows = np.array([5, 900, 3, 77], dtype=np.int64)
    together = order.uniforms(3, 1, rows, 4)
    for position, row in enumerate(rows):
        assert np.array_equal(order.uniforms(3, 1, rows[position : position + 1], 4)[0], together[position]), row
