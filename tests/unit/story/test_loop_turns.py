"""What the loop does at which step: the learning rate, commits, evaluations, records, and honest timing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from hvd_train import checkpoint
from hvd_train.checkpoint import DiskStore
from hvd_train.config import Config
from hvd_train.data import loader
from hvd_train.data.array_loader import ArrayLoader
from hvd_train.data.batches import Batch
from hvd_train.job import Clocks
from hvd_train.progress.clock import Stopwatch, Timer
from hvd_train.progress.order import Assignment
from hvd_train.run_files.ledger import audit
from hvd_train.state import TrainState
from hvd_train.world.world import LocalWorld, PendingSum, Request, WorldChanged, already_in_sync
from tests.support.runs import NUM_SAMPLES, Weights, equal, small_config, trained
from tests.support.worlds import StoppingWorld, ThreadWorld, run_ranks

T = TypeVar("T")
LONG_S = 1000.0
"""How long an evaluation takes by the clock of `_one_second_a_step`."""


class Ticking(nn.Module):
    """A network that keeps the time: a forward pass of training takes a second, one of an evaluation much longer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.now = nn.Linear(64, 10), 0.0

    def forward(self, images: Tensor) -> Tensor:
        """The logits."""
        if self.training:
            self.now += 1.0
        elif self.now:  # it is tried out before the first step
            self.now += LONG_S
        logits: Tensor = self.body(images.flatten(1))
        return logits


def records(kind: str) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl of a kind."""
    lines = map(json.loads, Path("run/metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


@pytest.fixture
def committed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that have been committed; each commit is on disk before the next step."""
    steps = list[int]()

    def at_once(store: DiskStore, state: TrainState) -> bool:
        steps.append(state.progress.step)
        return store.commit_last(state).result()

    monkeypatch.setattr(DiskStore, "commit", at_once)
    return steps


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> Ticking:
    """A model by whose clock all times of a training are measured."""
    model = Ticking()

    def clocks(config: Config) -> Clocks:
        limits = config.run.commit_seconds, config.run.max_seconds
        return Clocks(*(Timer(limit, lambda: model.now) for limit in limits), stopwatch=Stopwatch(lambda: model.now))

    monkeypatch.setattr(Clocks, "of", clocks)
    return model


def linear(num_classes: int) -> nn.Module:
    """Return the smallest network."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))


def test_the_learning_rate_is_that_of_the_middle_of_each_batch() -> None:
    """It rises with every step of a warm-up, from above zero; the last batch of an epoch is smaller."""
    trained(LocalWorld(), small_config(epochs=2, warmup_epochs=2.0, learning_rate=0.5), linear)
    middles = [20 * step + 10 for step in range(9)] + [185]
    expected = [0.5 * (epoch * NUM_SAMPLES + middle) / (2 * NUM_SAMPLES) for epoch in range(2) for middle in middles]
    assert [record["learning_rate"] for record in records("step")] == pytest.approx(expected, rel=1e-12)


def test_steps_have_records_and_commits_in_their_turns(committed: list[int]) -> None:
    """Every third and every fourth step, counted over the whole run; a record says how many samples came before it."""
    trained(LocalWorld(), small_config(epochs=2, log_steps=3, commit_steps=4), linear)
    assert [record["step"] for record in records("step")] == [3, 6, 9, 12, 15, 18]
    assert [record["samples"] for record in records("step")] == [60, 120, 180, 230, 290, 350]
    assert [record["epoch"] for record in records("step")] == [1, 1, 1, 2, 2, 2]
    assert committed == [4, 8, 12, 16, 20]


def test_lines_that_the_files_lack_are_written_before_the_first_step() -> None:
    """The commit has the records of its last step; a rank 0 that was killed may not have written them."""
    config = small_config(epochs=1, ledger=True)
    trained(StoppingWorld(5), config, linear)
    for path in (Path("run/metrics.jsonl"), Path("run/ledger.jsonl")):
        lines = path.read_text().splitlines(keepends=True)
        kept = [line for line in lines if '"step": 5' not in line and '"steps": [5, 5]' not in line]
        assert len(kept) < len(lines)
        path.write_text("".join(kept))
    trained(LocalWorld(), config, linear)
    assert [record["step"] for record in records("step")] == [*range(1, 11)]
    assert audit(Path("run")).faults == ()


def test_a_commit_is_due_so_many_seconds_after_the_one_before(ticking: Ticking, committed: list[int]) -> None:
    """And not at every step from the first one on."""
    trained(LocalWorld(), small_config(epochs=1, batch_size=20, commit_seconds=3.0), lambda _: ticking)
    assert committed == [4, 8]


def test_a_commit_that_the_disk_was_too_busy_for_is_tried_again_at_the_next_step(
    ticking: Ticking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for the next turn, which may be a minute away."""
    asked: list[int] = []

    def busy_until_step_6(store: DiskStore, state: TrainState, *, wait: bool = False) -> bool:
        asked.append(state.progress.step)
        return state.progress.step >= 6

    monkeypatch.setattr(DiskStore, "commit", busy_until_step_6)
    trained(LocalWorld(), small_config(epochs=1, batch_size=20, commit_seconds=3.0), lambda _: ticking)
    assert asked == [4, 5, 6, 10]


def test_the_last_epoch_is_evaluated_whatever_its_turn() -> None:
    """A run does not end without scores of its last weights."""
    trained(LocalWorld(), small_config(epochs=3, eval_epochs=2), linear)
    assert [record["val_loss"] is not None for record in records("epoch")] == [False, True, True]


def test_the_means_of_an_epoch_are_of_that_epoch() -> None:
    """Over its own steps, each counted by its samples, and not over those of the epochs before."""
    trained(LocalWorld(), small_config(epochs=2), linear)
    counts = np.array([20] * 9 + [10])
    losses = np.array([record["loss"] for record in records("step")]).reshape(2, 10)
    means = (losses * counts).sum(1) / NUM_SAMPLES
    assert [record["loss"] for record in records("epoch")] == pytest.approx(means.tolist(), rel=1e-12)


def test_evaluations_are_no_training_time(ticking: Ticking) -> None:
    """Twenty images in a second of a step are 20 images/s, however long evaluations take."""
    result, _ = trained(LocalWorld(), small_config(epochs=3, batch_size=20), lambda _: ticking)
    trained_on = 3 * NUM_SAMPLES - 5 * 20  # the first steps warm up
    assert result.images_per_second == pytest.approx(trained_on / 25)
    assert records("epoch")[-1]["images_per_second"] == pytest.approx(trained_on / 25)


def test_the_world_learns_which_parameters_are_trained_from_now_on() -> None:
    """Before the first step of the epoch that thaws them: gradients that it does not know stay on their rank."""
    heard: list[tuple[int, list[str]]] = []

    class Regrouping(LocalWorld):
        @override
        def regroup(self, optimizer: Optimizer) -> None:
            heard.append((model[0].calls, [name for name, value in model.named_parameters() if value.requires_grad]))

    class Counts(nn.Flatten):
        calls = 0

        def forward(self, images: Tensor) -> Tensor:
            self.calls += self.training
            return super().forward(images)

    model: Any = nn.Sequential(Counts(), nn.Linear(64, 16), nn.Linear(16, 10))
    config = small_config(epochs=3, batch_size=20, freeze="1.*", unfreeze=("1:1.bias", "2:1.*"))
    trained(Regrouping(), config, lambda _: model)
    assert heard == [
        (0, ["2.weight", "2.bias"]),
        (10, ["1.bias", "2.weight", "2.bias"]),
        (20, ["1.weight", "1.bias", "2.weight", "2.bias"]),
    ]


class Moves(LocalWorld):
    """A world that forms anew after so many steps, which takes long by the model's clock."""

    def __init__(self, model: Ticking, after: int) -> None:
        super().__init__()
        self._model, self._left = model, after

    @override
    def requested(self, *, told_to_end: bool = False) -> Request:
        self._left -= 1
        return "change" if self._left == 0 else "train"

    @override
    def in_each_world(self, body: Callable[[], Iterable[T]], sync: Callable[[], None] = already_in_sync) -> Iterator[T]:
        sync()
        try:
            yield from body()
        except WorldChanged:
            self._model.now += LONG_S
            sync()
            yield from body()


def test_a_change_of_world_costs_neither_a_commit_nor_training_time(ticking: Ticking, committed: list[int]) -> None:
    """A commit that is due at the step of the change is taken; the change is told once, after the first step."""
    config = small_config(epochs=2, batch_size=20, commit_steps=8)
    result, _ = trained(Moves(ticking, 8), config, lambda _: ticking)
    assert committed == [8, 16]
    told = [(event["name"], event.get("step")) for event in records("event") if event["name"] in ("start", "world")]
    assert told == [("start", None), ("world", 9)]
    assert result.images_per_second == pytest.approx((2 * NUM_SAMPLES - 5 * 20) / 15)


def test_a_time_limit_stops_after_the_step_in_which_it_is_over(ticking: Ticking) -> None:
    """Committed, so that the same command goes on from there."""
    config = small_config(batch_size=20, max_time="3s")
    result, _ = trained(LocalWorld(), config, lambda _: ticking)
    assert (result.finished, result.stopped_by, result.saved, result.steps) == (False, None, True, 4)
    assert [path.name for path in checkpoint.committed(Path("run"))] == ["step-0000000004.ckpt"]


def test_the_next_batch_is_made_while_gradients_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that waits for other ranks does not wait for its images after that."""
    made, waits = list[int](), list[int]()

    class Counts(ArrayLoader):
        @override
        def load(self, epoch: int, work: Iterable[Assignment]) -> Iterator[Batch]:
            for batch in super().load(epoch, work):
                made.append(epoch)
                yield batch

    class Waits(LocalWorld):
        @override
        def start_sum(self, tensor: Tensor, name: str) -> PendingSum:
            def wait() -> Tensor:
                waits.append(len(made))
                return tensor

            return wait

    monkeypatch.setattr(loader, "ArrayLoader", Counts)
    trained(Waits(), small_config(epochs=1, eval_epochs=100), linear)
    assert waits == [2, 3, 4, 5, 6, 7, 8, 9, 10, 10]


def test_a_record_has_what_the_step_has_found() -> None:
    """The norm of its gradient, and the scale of its loss where there is one."""
    trained(LocalWorld(), small_config(epochs=1, log_steps=4), linear)
    assert [(record["step"], record["gradient_norm"] > 0, record["loss_scale"]) for record in records("step")] == [
        (4, True, None),
        (8, True, None),
    ]
    shutil.rmtree("run")
    trained(LocalWorld(), small_config(epochs=1, precision="fp16"), linear)
    assert all(record["loss_scale"] >= 1 for record in records("step"))


def test_the_moving_average_is_evaluated_where_one_is_kept() -> None:
    """One that hardly moves has the scores of the first weights for ever."""
    trained(LocalWorld(), small_config(epochs=3, ema_decay=0.999999), linear)
    first, *others = [record["val_loss"] for record in records("epoch")]
    assert others == pytest.approx([first] * 2, rel=1e-3)
    losses = [record["loss"] for record in records("epoch")]
    assert losses[2] < 0.9 * losses[0], "this cannot tell the average from the model"


def test_the_best_weights_are_those_of_the_best_epoch() -> None:
    """And not those of the last one that was evaluated."""
    config = small_config(best_by="loss", learning_rate=0.5, schedule="constant", epochs=4)
    result, weights = trained(LocalWorld(), config)
    losses = [record["val_loss"] for record in records("epoch")]
    best = losses.index(min(losses)) + 1
    assert best < 4, "this cannot tell the best epoch from the last"
    assert result.best_epoch == best
    stored = torch.load(Path("run") / checkpoint.BEST, weights_only=True)
    assert not equal(stored, weights)
    again = config.replace(epochs=best, output_dir=Path("again"))
    assert equal(stored, trained(LocalWorld(), again)[1])


def test_buffers_that_change_unseen_are_those_of_rank_0_when_an_epoch_ends() -> None:
    """What a model writes by way of `tensor.data` would differ between the ranks that evaluate it."""

    class Unseen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("brightness", torch.zeros(()))
            self.brightness: Tensor
            self.passes = 0

        def forward(self, images: Tensor) -> Tensor:
            self.passes += self.training
            if self.training and self.passes > 10:  # in the first step it would be seen
                self.brightness.data.add_(images.sum().detach())
            return images

    def body(world: ThreadWorld) -> Weights:
        return trained(world, small_config(epochs=1), lambda classes: nn.Sequential(Unseen(), linear(classes)))[1]

    first, second = run_ranks(2, body)
    assert float(first["0.brightness"]) != 0
    assert equal(first, second)
