"""Parameters that are not trained, and those that are from some epoch on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_train.config import Config
from hvd_train.errors import UsageError
from hvd_train.network import freeze
from hvd_train.run import check
from hvd_train.settings.model import ModelConfig
from hvd_train.world.world import LocalWorld
from tests.support import runs
from tests.support.elastic import Hosts, Kill, run_elastic
from tests.support.runs import Weights, equal, largest_difference, small_config, trained
from tests.support.worlds import StoppingWorld, own_generator, run_ranks

pytestmark = pytest.mark.numeric

GRADUAL: dict[str, Any] = {"freeze": "backbone", "unfreeze": ("1:1.*", "3:*"), "epochs": 4}


def initial() -> Weights:
    """The weights that every training here starts from."""
    return dict(own_generator(runs.batch_norm(10)).state_dict())


def changed(before: Weights, after: Weights) -> set[str]:
    """Names of what is not the same to the last bit."""
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_only_the_head_is_trained() -> None:
    """`--freeze backbone`: all else stays to the last bit, the statistics of frozen batch norm too."""
    _, weights = trained(LocalWorld(), small_config(freeze="backbone", epochs=1), runs.batch_norm)
    assert changed(initial(), weights) == {"5.weight", "5.bias"}


def test_what_a_model_has_frozen_itself_stays_frozen() -> None:
    """Without `--freeze` the user's own model says what is trained."""

    def half_frozen(num_classes: int) -> torch.nn.Module:
        model = runs.convnet(num_classes)
        model[0].requires_grad_(False)
        return model

    before = dict(own_generator(runs.convnet(10)).state_dict())
    _, weights = trained(LocalWorld(), small_config(epochs=1), half_frozen)
    assert changed(before, weights) == {"4.weight", "4.bias"}


def test_frozen_parameters_take_no_part_in_the_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    """What travels is as large as what is trained."""
    from tests.support.worlds import ThreadWorld

    sizes = set()
    start_sum = ThreadWorld.start_sum

    def noted(self: ThreadWorld, tensor: torch.Tensor, name: str) -> Any:
        if name.startswith("gradient"):
            sizes.add(tensor.numel())
        return start_sum(self, tensor, name)

    monkeypatch.setattr(ThreadWorld, "start_sum", noted)
    run_ranks(2, lambda world: trained(world, small_config(freeze="backbone", epochs=1), runs.batch_norm))
    assert sizes == {1280, 10}


def test_thawing_is_a_function_of_the_epoch() -> None:
    """The head, from epoch 1 on the batch norm as well, from epoch 3 on everything."""
    model = runs.batch_norm(10)
    config = Config().replace(**GRADUAL).model
    trainable = []
    for epoch in range(5):
        freeze.apply(config, model, epoch)
        trainable.append({name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad})
        assert model[1].training == (epoch >= 1), "frozen batch norm must stay in evaluation mode"
    assert trainable == [{"5"}, {"1", "5"}, {"1", "5"}, {"0", "1", "5"}, {"0", "1", "5"}]
    assert freeze.ever_trained(config, model) == {name for name, _ in model.named_parameters()}


def test_gradual_thawing_on_ranks_and_one() -> None:
    """Two ranks come to the weights of one."""
    _, expected = trained(LocalWorld(), small_config(**GRADUAL, output_dir=Path("one")), runs.batch_norm)
    results = run_ranks(
        2, lambda world: trained(world, small_config(**GRADUAL, output_dir=Path("two")), runs.batch_norm)
    )
    assert all(largest_difference(weights, expected) <= 1e-5 for _, weights in results)
    assert len(changed(initial(), expected)) == len(expected)


@pytest.mark.parametrize("after", [12, 27, 33])
def test_gradual_thawing_stopped_and_resumed(after: int) -> None:
    """In whatever stage, and bit-identical."""
    _, expected = trained(LocalWorld(), small_config(**GRADUAL, output_dir=Path("whole")), runs.batch_norm)
    config = small_config(**GRADUAL, output_dir=Path("stopped"))
    result, _ = trained(StoppingWorld(after), config, runs.batch_norm)
    assert not result.finished
    _, weights = trained(LocalWorld(), config, runs.batch_norm)
    assert equal(weights, expected)


def test_gradual_thawing_while_workers_come_and_go() -> None:
    """Rank 0 dies in the second stage, another host joins in the last one: no bit is trained too early or too late."""
    settings: dict[str, Any] = {**GRADUAL, "ema_decay": 0.9, "decay_of": "weights", "clip_norm": 1.0}
    trained(LocalWorld(), small_config(**settings, output_dir=Path("alone")), runs.batch_norm)
    config = small_config(**settings, output_dir=Path("elastic"))
    events = [Kill(15, rank=0), Hosts(33, (("h1", 1), ("h2", 1), ("h3", 1)))]
    run_elastic(lambda world: trained(world, config, runs.batch_norm), {"h1": 1, "h2": 1}, events, first=2)
    found, expected = (torch.load(Path(run) / "model-final.pt", weights_only=True) for run in ("elastic", "alone"))
    assert largest_difference(found, expected) <= 1e-5


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"freeze": "layer9.*"}, "no parameter of the model is called layer9.*; they are called 0.weight"),
        ({"freeze": "*"}, "--freeze * freezes every parameter"),
        ({"freeze": "backbone", "unfreeze": ("3:nothing.*",)}, "no parameter of the model is called nothing.*"),
    ],
)
def test_names_that_are_not_there(settings: dict[str, Any], reason: str) -> None:
    """A pattern without a match, at any epoch, or one that leaves nothing to train."""
    with pytest.raises(UsageError) as told:
        trained(LocalWorld(), small_config(**settings), runs.batch_norm)
    assert reason in str(told.value)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"unfreeze": ("5:x",)}, "--unfreeze without --freeze"),
        ({"freeze": "backbone", "unfreeze": ("layer4",)}, "--unfreeze layer4: write it as EPOCH:PATTERN"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], reason: str) -> None:
    """Told before anything starts."""
    with pytest.raises(UsageError, match=reason.replace("*", r"\*")):
        check(Config().replace(**settings))


def test_a_pattern_freezes_what_it_names() -> None:
    """And nothing else."""
    assert freeze.frozen(ModelConfig(freeze="[01].*"), runs.batch_norm(10), 0) == {"0.weight", "1.weight", "1.bias"}


def test_a_change_of_what_is_trained_is_told_once() -> None:
    """Horovod makes its groups of gradients anew then; a parameter that is frozen keeps no gradient of before."""
    model = runs.batch_norm(10)
    config = Config().replace(freeze="backbone", unfreeze=("1:1.*",)).model
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert [freeze.apply(config, model, epoch) for epoch in (0, 0, 1, 1)] == [True, False, True, False]
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradient == {"5.weight", "5.bias"}


def test_an_optimizer_is_built_for_all_that_is_ever_trained() -> None:
    """Whatever the model has frozen itself; without `--freeze` that is for the model to say."""
    for unfreeze, trained_ones in (((), {"5"}), (("3:1.*",), {"1", "5"}), (("3:1.*", "12:0.*"), {"0", "1", "5"})):
        model = runs.batch_norm(10).requires_grad_(False)
        config = ModelConfig(freeze="backbone", unfreeze=unfreeze)
        freeze.prepare(config, model)
        found = {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad}
        assert found == trained_ones
        assert {name.split(".")[0] for name in freeze.ever_trained(config, model)} == trained_ones
    model = runs.batch_norm(10).requires_grad_(False)
    freeze.prepare(ModelConfig(), model)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_without_freezing_nothing_is_touched() -> None:
    """Neither what requires a gradient, nor the gradients, nor the modes of layers."""
    model = runs.batch_norm(10)
    model[0].requires_grad_(False)
    model[1].eval()
    model[5].weight.grad = torch.ones_like(model[5].weight)
    assert freeze.frozen(ModelConfig(), model, 0) == set()
    assert freeze.apply(ModelConfig(), model, 0) is False
    assert not model[0].weight.requires_grad
    assert not model[1].training
    assert model[5].weight.grad is not None


def test_statistics_follow_the_weights_that_they_belong_to() -> None:
    """A batch norm without weights of its own, and a model that is evaluated, keep their modes."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3, affine=False), torch.nn.Linear(3, 2))
    config = ModelConfig(freeze="backbone", unfreeze=("1:0.weight",))
    modes = []
    for epoch, training in ((0, True), (1, True), (0, False), (1, False)):
        model.train(training)
        freeze.apply(config, model, epoch)
        modes.append([layer.training for layer in model])
    assert modes == [[False, True, True], [True, True, True], [False] * 3, [False] * 3]


def test_what_cannot_be_frozen_is_told_with_what_there_is() -> None:
    """The first four names, or that there is no head to leave out."""
    with pytest.raises(UsageError, match="--freeze backbone: the model has no linear or convolutional layer"):
        freeze.frozen(ModelConfig(freeze="backbone"), torch.nn.BatchNorm1d(3), 0)
    with pytest.raises(UsageError) as told:
        freeze.frozen(ModelConfig(freeze="x*"), runs.batch_norm(10), 0)
    assert str(told.value) == (
        "--freeze x*: no parameter of the model is called x*; they are called 0.weight, 1.weight, 1.bias, 5.weight, ..."
    )
