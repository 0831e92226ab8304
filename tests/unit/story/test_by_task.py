"""What a training by a task does with a slot."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hvd_train import Config
from hvd_train.data.trees import Tree
from hvd_train.network.optim import build
from hvd_train.progress.order import Cut
from hvd_train.settings.optimizer import OptimizerConfig
from hvd_train.state import TrainState
from hvd_train.step import Votes
from hvd_train.world.world import LocalWorld
from tests.support import runs
from tests.support.batches import batch_of
from tests.support.runs import small_config, trained
from tests.support.steps import TaskSteps
from tests.support.tasks import meter_of_classes
from tests.support.worlds import own_generator
from tests.unit.story.test_loop import records
from tests.unit.story.test_step import CPU, batch


def test_mixed_images_are_learnt_and_hits_counted_by_their_own_classes() -> None:
    """The loss is that of the mixed targets; what is measured refers to the classes that the samples have."""
    model = own_generator(runs.convnet(10))
    (micro,) = batch(8, 8).micro_batches
    with torch.no_grad():
        logits = model(micro.inputs)
    classes = logits.argmax(1)

    def mix(inputs: Tree, targets: Tensor) -> tuple[Tree, Tensor]:
        return inputs, torch.nn.functional.one_hot((targets + 1) % 10, 10).float()

    own = batch_of(8, 1, type(micro)(0, micro.inputs, classes, micro.samples))
    state = TrainState(model, build(OptimizerConfig(), model), torch.amp.GradScaler("cpu", enabled=False), Cut(8, 8))
    steps = TaskSteps(Config(), LocalWorld(), model, CPU, meter_of_classes(), mix)
    result = steps.take(state, own, Votes(), want_norm=False)
    assert result.totals.sums[1] == 8, "each hit, by the classes of the samples"
    expected = torch.nn.functional.cross_entropy(logits, (classes + 1) % 10, reduction="sum").item()
    assert result.totals.loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("eval_epochs", "evaluated"), [(1, [1, 2, 3]), (2, [2, 3]), (5, [3])])
def test_evaluations_come_at_the_ends_of_epochs(eval_epochs: int, evaluated: list[int]) -> None:
    """Of every so many, and of the last one."""
    trained(LocalWorld(), small_config(epochs=3, eval_epochs=eval_epochs))
    assert [line["epoch"] for line in records("epoch") if line["val_loss"] is not None] == evaluated
