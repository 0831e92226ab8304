"""Tasks: their measures, their figures, and what is refused."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hvd_train import Each, Mean, Task, Total, UsageError, evaluate, train
from hvd_train.tasks.builtin import hits
from hvd_train.tasks.task import fields_of, numbers_of, totals_of
from hvd_train.world.world import LocalWorld, World
from tests.support import runs
from tests.support.runs import largest_difference, small_config, trained
from tests.support.worlds import own_generator, run_ranks

# a loss, a hit, a number of tokens
SAMPLE = st.tuples(st.integers(0, 3000), st.booleans(), st.integers(0, 9))


@given(st.lists(st.lists(SAMPLE, min_size=1, max_size=4), min_size=1, max_size=4))
def test_measures_are_summed_and_divided_once(parts: list[list[tuple[int, bool, int]]]) -> None:
    """A tensor and a plain Mean by samples, another Mean by its count;
    float16 does not overflow.
    """
    fields = []
    summed = torch.zeros(9)
    for part in parts:
        loss, right, tokens = map(torch.tensor, zip(*part, strict=True))
        measures = {
            "right": right,
            "loss": 10 * loss.half(),
            "tokens": Mean(2.0 * tokens.sum(), tokens.sum()),
        }
        measures |= {"all": Mean(3.0 * loss.sum()), "table": Total(torch.eye(2))}
        fields = fields_of(measures, len(part))
        summed += numbers_of(measures, fields, torch.float32)
    whole = [sample for part in parts for sample in part]
    means = totals_of(fields[:-1], summed.tolist(), len(whole)).means()
    loss, right, tokens = (sum(column) for column in zip(*whole, strict=True))
    assert means["loss"] == pytest.approx(10 * loss / len(whole), rel=1e-3)
    assert (means["right"], means["all"]) == (right / len(whole), 3 * loss / len(whole))
    assert means["tokens"] == 2 if tokens else math.isnan(means["tokens"])
    assert summed[-4:].tolist() == [len(parts), 0, 0, len(parts)]


def test_the_first_five_answers_count() -> None:
    logits = torch.tensor([[6.0, 5, 4, 3, 2, 1, 0]] * 7)
    assert hits(logits, torch.tensor([0, 0, 0, 1, 4, 5, 6])).sum(0).tolist() == [3, 1, 0, 0, 1]


LOSS = torch.ones(2)
WRONG = [
    (LOSS, "Tensor of shape \\[2\\].*: return a dict of measures with a 'loss'"),
    ({"loss": LOSS.mean()}, "'loss' is Tensor of shape .* for 2 samples: .*reduction='none'"),
    ({"loss": LOSS, "right": 0.5}, "'right' is 0.5 for 2 samples"),
    ({"loss": Total(LOSS)}, "'loss' is Total for 2 samples"),
    ({"loss": Each(LOSS)}, "'loss' is Each for 2 samples"),
    ({"loss": LOSS, "x": Each(torch.ones(3))}, "'x' is Each for 2 samples"),
    ({"loss": Mean(LOSS)}, "'loss' is Mean for 2 samples: .*one number as total"),
    ({"loss": LOSS, "step": LOSS}, "named 'step': take another name"),
]


@pytest.mark.parametrize(("measures", "says"), WRONG)
def test_wrong_measures_are_refused_before_training(measures: Any, says: str) -> None:
    """In one line that says what to return."""
    with pytest.raises(UsageError, match=says):
        trained(LocalWorld(), small_config(), task=Task(lambda *_: measures))
    assert not Path("run").exists()


def test_a_goal_that_a_task_does_not_have_is_refused() -> None:
    task = Task(lambda *_: {"loss": LOSS}, best="top1")
    with pytest.raises(UsageError, match="best is 'top1', but its evaluation has loss"):
        trained(LocalWorld(), small_config(), task=task)


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


class Sentences:
    """Items are dicts with numbers of words in any length, a text, and a share as target."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = 1 + torch.arange(index, index + 1 + index % 5)
        return {"words": words, "text": f"no. {index}", "share": torch.tensor(index / 50)}


@dataclasses.dataclass
class Padded:
    words: Tensor
    shares: Tensor
    texts: list[str]


def padded(items: list[dict[str, Any]]) -> Padded:
    words, texts, shares = ([item[name] for item in items] for name in ("words", "text", "share"))
    whole = nn.utils.rnn.pad_sequence(words, batch_first=True)
    return Padded(whole, torch.stack(shares), texts)


def embedded() -> nn.Module:
    """Return a model of the mean over words; 0 is padding."""
    table = nn.EmbeddingBag(64, 4, mode="mean", padding_idx=0)
    return own_generator(nn.Sequential(table, nn.Linear(4, 1), nn.Flatten(0)))


def regression(collate: Callable[[list[Any]], Any] | None = padded) -> Task:
    def measure(model: nn.Module, batch: Padded) -> dict[str, Tensor]:
        assert len(batch.texts) == len(batch.shares)
        error = model(batch.words) - batch.shares
        return {"loss": error.square(), "error": error.abs()}

    return Task(measure, collate=collate, best="error", sample="sentence")


def sentences(config: object) -> tuple[Sentences, Sentences]:
    return Sentences(), Sentences()


def test_items_may_be_any_trees_of_tensors() -> None:
    """Padding does not know ranks; a data set needs no classes, and a model no argument."""
    config = small_config(epochs=4, learning_rate=0.1)

    def on_rank(world: World) -> tuple[runs.Weights, dict[str, float]]:
        model = embedded()
        here = config.replace(output_dir=Path(f"run-{world.place.size}"))
        result = train(here, model=lambda: model, data=sentences, task=regression(), world=world)
        return runs.to_host(model.state_dict()), dict(result.scores)

    ((alone, scores),) = run_ranks(1, on_rank)
    assert largest_difference(alone, embedded().state_dict()) > 1e-2
    for weights, same in run_ranks(3, on_rank):
        assert largest_difference(weights, alone) <= 1e-5
        assert same == pytest.approx(scores, abs=1e-6)


@pytest.mark.parametrize(
    ("model", "task", "says"),
    [
        (embedded, regression(None), r"do not fit into a batch \(.*, or give Task .*: collate="),
        (
            embedded,
            Task(lambda model, batch: {"loss": model(batch.words).detach()}, collate=padded),
            r"the loss depends on no trained parameter: leave out detach\(\)",
        ),
        (
            lambda num_classes: embedded(),
            regression(),
            "needs an argument, but .* the training set has no .*classes",
        ),
    ],
)
def test_what_a_task_needs_of_data_and_model_is_said(model: Any, task: Task, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        train(small_config(), model=model, data=sentences, task=task)


def test_figures_of_numpy_and_torch_are_numbers() -> None:
    """A checkpoint with them can be resumed from; what is no number is named."""
    task = dataclasses.replace(
        runs.CLASSIFY,
        best="spread",
        summary=lambda scores: {"spread": np.float32(2)},
        per_class=lambda scores: {np.str_("a"): np.float32(3), 1: torch.tensor(4)},
    )
    config = small_config(epochs=1)
    trained(LocalWorld(), config, task=task)
    result, _ = trained(LocalWorld(), config.replace(epochs=2), task=task)
    assert (result.epochs, result.best["spread"]) == (2, 2)
    assert type(result.best["spread"]) in (int, float)
    wrong = dataclasses.replace(task, summary=lambda scores: {"ap": None})
    says = r"the task's summary\['ap'\] is NoneType: it must be one number"
    with pytest.raises(UsageError, match=says):
        trained(LocalWorld(), config, task=wrong)
