"""Optimizers and the moving average of the weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hvd_train import checkpoint
from hvd_train.config import OptimizerConfig
from hvd_train.errors import UsageError
from hvd_train.network import optim
from hvd_train.run import evaluate
from hvd_train.world.world import LocalWorld
from tests.support import runs
from tests.support.runs import Weights, largest_difference, small_config, trained
from tests.support.worlds import run_ranks


def test_weights_alone_decay_and_all_follow_the_learning_rate() -> None:
    model = nn.Sequential(
        nn.Linear(2, 3), nn.BatchNorm1d(3), nn.LayerNorm(3), nn.Linear(3, 4, bias=False)
    )
    model[3].weight.requires_grad_(False)
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = optim.build(OptimizerConfig(weight_decay=0.1, decay_of="weights"), model)
    found = {g["weight_decay"]: [names[p] for p in g["params"]] for g in optimizer.param_groups}
    assert found == {0.1: ["0.weight"], 0.0: ["0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]}
    (every,) = optim.build(OptimizerConfig(weight_decay=0.1), model).param_groups
    assert len(every["params"]) == 6
    optim.set_learning_rate(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]
    with pytest.raises(UsageError, match="no parameter to train"):
        optim.build(OptimizerConfig(), model.requires_grad_(False))


class NoDecay(torch.optim.SGD):
    def __init__(self, params: Any, lr: float, dampening: float = 0.0) -> None:
        super().__init__(params, lr, dampening=dampening)


def test_an_optimizer_of_ones_own_gets_what_it_takes() -> None:
    config = OptimizerConfig(
        optimizer=f"{__name__}:NoDecay", optimizer_args=("dampening=0.5",), decay_of="weights"
    )
    built = optim.build(config, nn.Linear(2, 2))
    assert isinstance(built, NoDecay)
    for group in built.param_groups:
        assert (group["dampening"], group["weight_decay"]) == (0.5, 0.0)


SETTINGS = {"epochs": 2, "ema_decay": 0.9}


def final(folder: str) -> Weights:
    return torch.load(Path(folder) / checkpoint.FINAL, weights_only=True)


def test_the_moving_average_is_what_its_formula_says() -> None:
    """It starts at the first weights, then is 0.9 of itself and 0.1 of the
    new weights and statistics.
    """
    model = nn.BatchNorm1d(2)
    average = optim.MovingAverage(model, 0.9)
    for value, expected in ((1.0, 1.0), (2.0, 1.1), (4.0, 1.39)):
        for tensor in model.state_dict().values():
            tensor.fill_(value)
        average.update_parameters(model)
        for name in ("weight", "bias", "running_mean", "running_var"):
            assert getattr(average.module, name).tolist() == pytest.approx([expected] * 2)


def test_evaluations_and_files_have_the_moving_average() -> None:
    config = small_config(**SETTINGS, output_dir=Path("run"))
    result, last = trained(LocalWorld(), config, runs.batch_norm)
    assert largest_difference(final("run"), last) > 1e-3, "the last weights themselves"
    newest = checkpoint.committed(Path("run"))[0]
    scores = evaluate(newest, model=runs.batch_norm, data=runs.few_digits, world=LocalWorld())
    assert scores["loss"] == pytest.approx(result.scores["loss"], abs=1e-6)


def test_the_moving_average_has_the_other_buffers_of_the_model() -> None:
    """It has them on ranks and alone."""
    config = small_config(**SETTINGS, output_dir=Path("two"))
    results = run_ranks(2, lambda world: trained(world, config, runs.remembers))
    last = results[0][1]
    found = final("two")
    names = {name for name, _ in runs.remembers(10).named_buffers()} - {"0.unsaved"}
    assert all(torch.equal(found[name], last[name]) for name in names)
    trained(LocalWorld(), config.replace(output_dir=Path("alone")), runs.remembers)
    assert largest_difference(found, final("alone")) <= 1e-5
