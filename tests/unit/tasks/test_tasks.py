"""Tasks: their measures, their figures, and what is refused."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_train import Config, Mean, Task, Total, UsageError, evaluate
from hvd_train.progress.order import EpochOrder
from hvd_train.tasks.classification import hits
from hvd_train.tasks.measures import fields_of, numbers_of, totals_of
from hvd_train.world.world import LocalWorld, World
from tests.support import runs
from tests.support.runs import largest_difference, small_config, trained
from tests.support.worlds import own_generator, run_ranks


def test_measures_are_summed_and_divided_once() -> None:
    """A tensor and a plain Mean by samples, another Mean by its count; float16 does not overflow."""
    large = torch.full((3,), 3e4, dtype=torch.float16)
    measures = {"right": torch.tensor([True, False, True]), "loss": large, "tokens": Mean(torch.tensor(6.0), 4)}
    measures |= {"all": Mean(torch.tensor([9.0])), "table": Total(torch.eye(2))}
    fields = fields_of(measures, 3)
    assert [(field.name, field.kind) for field in fields] == [
        ("loss", "samples"), ("right", "samples"), ("tokens", "count"), ("all", "samples"), ("table", "total"),
    ]  # fmt: skip
    numbers = numbers_of(measures, fields, torch.float32)
    assert numbers.tolist() == [9e4, 2, 6, 4, 9, 1, 0, 0, 1]
    means = totals_of(fields[:-1], numbers.tolist(), 3).means()
    assert means == {"loss": 3e4, "right": 2 / 3, "tokens": 1.5, "all": 3.0}


def test_the_first_five_answers_count() -> None:
    logits = torch.tensor([[6.0, 5, 4, 3, 2, 1, 0]] * 7)
    assert hits(logits, torch.tensor([0, 0, 0, 1, 4, 5, 6])).sum(0).tolist() == [3, 1, 0, 0, 1]


LOSS = torch.ones(2)
WRONG: dict[str, tuple[Any, str]] = {
    "no dict": (LOSS, "a tensor of shape \\[2\\]: return a dict of measures with a 'loss'"),
    "no loss": ({"accuracy": LOSS}, "return a dict of measures with a 'loss'"),
    "scalar": ({"loss": LOSS.mean()}, "'loss' is a tensor of shape \\[\\] for 2 samples: .*reduction='none'"),
    "float": ({"loss": LOSS, "right": 0.5}, "'right' is float for 2 samples"),
    "total": ({"loss": Total(LOSS)}, "loss is a Total"),
    "mean": ({"loss": Mean(LOSS)}, "'loss' is a Mean of a tensor of shape \\[2\\]: its total must be one number"),
    "name": ({"loss": LOSS, "step": LOSS}, "named 'step': take another name"),
    "prefix": ({"loss": LOSS, "val_loss": LOSS}, "named 'val_loss'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_measures_are_refused_before_training(case: str) -> None:
    """In one line that says what to return."""
    measures, says = WRONG[case]
    with pytest.raises(UsageError, match=says):
        trained(LocalWorld(), small_config(), task=Task(lambda model, batch: measures))
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("settings", "task", "says"),
    [
        ({}, Task(lambda *_: {"loss": LOSS}, best="top1"), "best is 'top1', but its evaluation has loss"),
        ({"best_by": "top2"}, None, "--best-by top2: .*it is for top1 and loss"),
        ({"target": "top5=0.5"}, None, "--target top5: which values of it are better"),
        ({"target_accuracy": 0.5}, Task(lambda *_: {"loss": LOSS}), "--target-accuracy is --target top1"),
        ({"task": "clasification"}, None, "unknown task 'clasification'; did you mean 'classification'"),
    ],
)
def test_goals_that_a_task_does_not_have_are_refused(settings: Any, task: Task | None, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        trained(LocalWorld(), small_config(**settings), task=task)


@pytest.mark.parametrize("target", ["0.5", "loss", "loss=", "loss=x", "=1"])
def test_a_target_is_a_name_and_a_number(target: str) -> None:
    with pytest.raises(UsageError, match="type NAME=VALUE"):
        Config().replace(target=target)


def changes(after: int) -> Callable[..., dict[str, Tensor]]:
    """Return a function whose measures change after some calls."""
    calls = 0

    def measure(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        nonlocal calls
        calls += 1
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return {"loss": losses, **({"late": losses} if calls > after else {})}

    return measure


def test_measures_must_not_change() -> None:
    with pytest.raises(UsageError, match="other measures for one micro-batch than for another: late"):
        trained(LocalWorld(), small_config(batch_size=5), task=Task(changes(after=3)))


def test_a_count_weighs_as_in_one_batch() -> None:
    """Equal to plain torch, whatever the micro-batches and ranks, and though some have no odd digit."""
    config = small_config(epochs=1, augment="none", schedule="constant", warmup_epochs=0.0)
    model, few = own_generator(runs.convnet(10)), runs.few_digits(config.data)

    def on_rank(world: World) -> runs.Weights:
        folder = Path(f"run-{world.place.size}")
        return trained(world, config.replace(output_dir=folder), task=runs.odd_digits())[1]

    images = (few.train.images.float() / 255 - few.mean[0]) / few.std[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    for batch in torch.from_numpy(EpochOrder(0, 0, runs.NUM_SAMPLES)[:]).split(20):
        labels = few.train.labels[batch]
        odd = labels % 2 == 1
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch])[odd], labels[odd]).backward()
        optimizer.step()
    for size in (1, 3):
        for weights in run_ranks(size, on_rank):
            assert largest_difference(weights, dict(model.state_dict())) <= 1e-5


def test_a_figure_of_the_summary_decides_the_best_weights_and_the_end() -> None:
    config = small_config(epochs=9, target="wrong=34", task="custom")
    result, _ = trained(LocalWorld(), config, task=runs.odd_digits())
    assert result.why == "target wrong 34 reached"
    assert 0 < result.best["wrong"] == result.scores["wrong"] <= 34
    scores = evaluate(Path("run"), model=runs.convnet, data=runs.few_digits, task=runs.odd_digits())
    assert dict(scores) == pytest.approx(dict(result.best), abs=1e-6)
    assert scores.total("pairs").sum() == scores.count == 60
    assert scores["right"] == pytest.approx(1 - scores["wrong"] / 60)
    assert not math.isnan(scores["loss"])
    with pytest.raises(UsageError, match=r"a task that only its script knows: call .*task=\.\.\."):
        evaluate(Path("run"), model=runs.convnet, data=runs.few_digits)
