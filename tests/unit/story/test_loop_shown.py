"""What the loop tells of steps and epochs: to the display, to metrics.jsonl, and where their time went."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from hvd_train import output, training
from hvd_train.checkpoint import DiskStore
from hvd_train.data import loader
from hvd_train.data.array_loader import ArrayLoader
from hvd_train.data.batches import Batch
from hvd_train.errors import Diverged
from hvd_train.output import Output
from hvd_train.progress.clock import PHASES, Split
from hvd_train.progress.order import Assignment, order_of
from hvd_train.run_files.journal import RunJournal
from hvd_train.run_files.records import Moment, Plan
from hvd_train.state import TrainState
from hvd_train.world.world import LocalWorld
from tests.support.runs import NUM_SAMPLES, small_config, trained
from tests.support.worlds import StoppingWorld
from tests.unit.story.test_loop import Poisoned
from tests.unit.story.test_loop_turns import LONG_S, Ticking, linear, records, ticking

__all__ = ["ticking"]  # a fixture


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the journal was told: how long the training is to be, and each moment of it."""
    heard = list[Any]()

    class Heard(RunJournal):
        @override
        def begin(self, plan: Plan) -> None:
            heard.append((plan.epochs, plan.samples_per_epoch, [figure.name for figure in plan.shown], plan.unit))

        @override
        def progress(self, moment: Moment) -> None:
            heard.append(moment)

    monkeypatch.setattr(output, "RunJournal", Heard)
    return heard


def test_each_step_is_shown_with_the_means_of_its_epoch_so_far(shown: list[Any], ticking: Ticking) -> None:
    """Its number counts through the run; epoch and samples are those that are behind it, and the speed is known."""
    trained(LocalWorld(), small_config(epochs=2, batch_size=20), lambda _: ticking)
    (begun, *moments), steps = shown, records("step")
    assert begun == (2, NUM_SAMPLES, ["loss", "top1"], "images")
    assert [moment.step for moment in moments] == [*range(1, 21)]
    assert [moment.epoch for moment in moments] == [0] * 10 + [1] * 10
    assert [moment.cursor for moment in moments] == 2 * [*range(20, 190, 20), 190]
    assert [moment.images_per_second for moment in moments] == [0] * 5 + [
        step["images_per_second"] for step in steps[5:]
    ]
    assert moments[6].images_per_second == 20
    of_epoch = steps[10:13]
    for name in ("loss", "top1"):
        assert moments[10].scores()[name] == of_epoch[0][name]
        assert moments[12].scores()[name] == pytest.approx(sum(step[name] for step in of_epoch) / 3, rel=1e-12)
    assert {moment.scores()["loss"] == moment.scores()["top1"] for moment in moments} == {False}


def test_a_run_that_goes_on_is_shown_from_there(shown: list[Any]) -> None:
    """In the middle of its epoch, whose means are those of all its steps."""
    trained(StoppingWorld(3), small_config(epochs=2), linear)
    shown.clear()
    trained(LocalWorld(), small_config(epochs=2), linear)
    (begun, first, *_), steps = shown, records("step")
    assert begun == (2, NUM_SAMPLES, ["loss", "top1"], "images")
    assert (first.epoch, first.cursor, first.step) == (0, 80, 4)
    assert first.scores()["loss"] == pytest.approx(sum(step["loss"] for step in steps[:4]) / 4, rel=1e-12)


def test_the_record_of_an_epoch_has_all_its_scores() -> None:
    """Those of the training, those of the evaluation, and the number of its last step; each is what it is called."""
    result, _ = trained(LocalWorld(), small_config(epochs=2, eval_epochs=2), linear)
    first, last = records("epoch")
    assert [first[name] for name in ("epoch", "step", "val_loss", "val_top1", "val_top5")] == [1, 10, None, None, None]
    assert (last["epoch"], last["step"]) == (2, 20)
    assert [last[name] for name in ("val_loss", "val_top1", "val_top5")] == [*result.scores.values()]
    assert 0 < last["val_top1"] < last["val_top5"] < 1
    assert last["val_loss"] > 1
    assert (result.best_epoch, result.best) == (2, result.scores["top1"])


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, ticking: Ticking) -> Ticking:
    """A model by whose clock the phases of a step are measured, too; one slot is one step."""
    monkeypatch.setattr(training, "split_on", lambda device: Split(lambda: ticking.now))
    return ticking


def test_the_phases_of_steps_leave_out_what_is_no_step(timed: Ticking, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what comes before the first step nor an evaluation is in them."""
    write = Output.write_surroundings

    def slow(self: Output, *rest: Any) -> None:
        timed.now += LONG_S
        write(self, *rest)

    monkeypatch.setattr(Output, "write_surroundings", slow)
    trained(LocalWorld(), small_config(epochs=2, batch_size=20), lambda _: timed)
    assert [record["split"] for record in records("step")] == [{**dict.fromkeys(PHASES, 0.0), "forward": 1.0}] * 20


def test_the_time_of_a_loader_is_that_of_the_data(timed: Ticking, monkeypatch: pytest.MonkeyPatch) -> None:
    """And that of a commit is a phase of its own, in the record of the step after it."""

    class Slow(ArrayLoader):
        @override
        def load(self, epoch: int, work: Iterable[Assignment]) -> Iterator[Batch]:
            for number, batch in enumerate(super().load(epoch, work)):
                if number in (0, 3):
                    timed.now += 4.0
                yield batch

    def slow_commit(store: DiskStore, state: TrainState) -> bool:
        timed.now += 8.0
        return store.commit_last(state).result()

    monkeypatch.setattr(loader, "ArrayLoader", Slow)
    monkeypatch.setattr(DiskStore, "commit", slow_commit)
    trained(LocalWorld(), small_config(epochs=1, batch_size=20, commit_steps=5), lambda _: timed)
    splits = [record["split"] for record in records("step")]
    assert [split["commit"] for split in splits] == [0, 0, 0, 0, 0, 8, 0, 0, 0, 0]
    assert [split["data"] for split in splits] == [4, 0, 4, 0, 0, 0, 0, 0, 0, 0]


def test_a_skipped_step_is_told_with_its_number() -> None:
    """For programs, too."""
    trained(LocalWorld(), small_config(epochs=1), lambda _: Poisoned(lambda step: step == 4, "loss"))
    (told,) = [event for event in records("event") if event["name"] == "skipped"]
    assert told["step"] == 4


def test_of_many_samples_without_a_finite_loss_eight_are_named() -> None:
    """By their numbers in the data set, also where they come again and again; it is said how many more there are."""

    class AllBad(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = linear(10)

        def forward(self, images: Tensor) -> Tensor:
            logits: Tensor = self.body(images)
            return logits * torch.inf if self.training else logits

    config = small_config(epochs=2, repeated_augmentation=2, max_skipped_steps=1, batch_size=20)
    with pytest.raises(Diverged) as told:
        trained(LocalWorld(), config, lambda _: AllBad())
    samples = [int(sample) % NUM_SAMPLES for sample in order_of(config.seed, 0, NUM_SAMPLES, 2)[:20]]
    named = str(told.value).partition("(rank 0: samples ")[2].partition(")")[0]
    assert named.startswith(", ".join(map(str, samples[:8])))
    assert str(samples[8]) not in named.removeprefix(", ".join(map(str, samples[:8]))).split(", ")
    assert "12 more" in named
