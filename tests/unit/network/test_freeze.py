"""Frozen parameters, and parameters that are trained since a later epoch."""

from pathlib import Path
from typing import Any

import torch

from hvd_train.config import Config
from hvd_train.network import freeze
from hvd_train.world.world import LocalWorld
from tests.support import runs
from tests.support.elastic import Hosts, Kill, run_elastic
from tests.support.runs import largest_difference, small_config, trained
from tests.support.worlds import own_generator

GRADUAL: dict[str, Any] = {"freeze": "backbone", "unfreeze": ("1:1.*", "3:*"), "epochs": 4}


def test_only_the_head_is_trained() -> None:
    before = dict(own_generator(runs.batch_norm(10)).state_dict())
    _, weights = trained(LocalWorld(), small_config(freeze="backbone", epochs=1), runs.batch_norm)
    assert {name for name in before if not torch.equal(before[name], weights[name])} == {"5.weight", "5.bias"}


def test_thawing_is_a_function_of_the_epoch() -> None:
    model = runs.batch_norm(10)
    config = Config().replace(**GRADUAL).model
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    trainable = []
    for epoch in range(5):
        freeze.apply(config, model, epoch)
        trainable.append({name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad})
        assert model[1].training == (epoch >= 1), "frozen batch norm must stay in evaluation mode"
        if epoch == 0:
            assert {name for name, p in model.named_parameters() if p.grad is not None} == {"5.weight", "5.bias"}
    assert trainable == [{"5"}, {"1", "5"}, {"1", "5"}, {"0", "1", "5"}, {"0", "1", "5"}]
    freeze.apply(config, model, 0)
    freeze.apply(config, model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_gradual_thawing_while_workers_come_and_go() -> None:
    """No weight is trained too early or late; the moving average reaches the newcomer."""
    settings: dict[str, Any] = {**GRADUAL, "ema_decay": 0.9, "decay_of": "weights", "clip_norm": 1.0}
    trained(LocalWorld(), small_config(**settings, output_dir=Path("alone")), runs.batch_norm)
    config = small_config(**settings, output_dir=Path("elastic"))
    events = [Kill(15, rank=0), Hosts(33, (("h1", 1), ("h2", 1), ("h3", 1)))]
    run_elastic(lambda world: trained(world, config, runs.batch_norm), {"h1": 1, "h2": 1}, events, first=2)
    found, expected = (torch.load(Path(run) / "model-final.pt", weights_only=True) for run in ("elastic", "alone"))
    assert largest_difference(found, expected) <= 1e-5
