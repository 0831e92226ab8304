"""The optimizers, which are torch's and timm's, and the moving average of the weights."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from hvd_train import checkpoint
from hvd_train.checkpoint import DiskStore
from hvd_train.errors import UsageError
from hvd_train.network import optim
from hvd_train.run import evaluate
from hvd_train.settings.optimizer import OptimizerConfig
from hvd_train.world.world import LocalWorld
from tests.support import runs
from tests.support.elastic import Hosts, Kill, run_elastic
from tests.support.runs import Weights, equal, largest_difference, small_config, trained
from tests.support.worlds import StoppingWorld, own_generator, run_ranks

pytestmark = pytest.mark.numeric

PUBLISHED: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (Adam, {"fused": True}),
    "adamw": (AdamW, {"fused": True}),
}


def stepped(model: nn.Module, optimizer: Optimizer, steps: int) -> list[torch.Tensor]:
    images, labels = torch.cos(torch.arange(8 * 64.0).view(8, 1, 8, 8)), torch.arange(8)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_optimizer_is_torchs_to_the_last_bit(name: str) -> None:
    config = OptimizerConfig(optimizer=name, learning_rate=0.01, weight_decay=0.1, nesterov=name == "sgd")  # type: ignore[arg-type]
    ours, theirs, restored = (own_generator(runs.convnet(10)) for _ in range(3))
    mine = optim.build(config, ours)
    cls, more = PUBLISHED[name]
    other = cls(theirs.parameters(), lr=0.01, weight_decay=0.1, **more)  # type: ignore[call-arg]
    assert isinstance(mine, cls)
    assert all(map(torch.equal, stepped(ours, mine, 3), stepped(theirs, other, 3)))
    again = optim.build(config, restored)
    again.load_state_dict(other.state_dict())
    restored.load_state_dict(theirs.state_dict())
    assert all(map(torch.equal, stepped(ours, mine, 2), stepped(restored, again, 2)))


def test_lars_and_lamb_are_those_of_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    from timm.optim.lamb import Lamb
    from timm.optim.lars import Lars

    model = nn.Sequential(nn.Linear(2, 3))
    for name, kind in (("lars", Lars), ("lamb", Lamb)):
        config = OptimizerConfig(learning_rate=0.3, weight_decay=0.02, momentum=0.7, decay_of="weights")
        optimizer = optim.build(replace(config, optimizer=name, nesterov=name == "lars"), model)  # type: ignore[arg-type]
        assert type(optimizer) is kind
        assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.3, 0.02), (0.3, 0.0)]
        if name == "lars":
            assert [(g["momentum"], g["nesterov"]) for g in optimizer.param_groups] == [(0.7, True)] * 2
    for module in ("timm", "timm.optim.lamb", "timm.optim.lars"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match="--optimizer lars: timm is not installed: pip install timm"):
        optim.build(OptimizerConfig(optimizer="lars"), nn.Linear(2, 2))


def test_weights_alone_decay_and_all_follow_the_learning_rate() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.LayerNorm(3), nn.Linear(3, 4, bias=False))
    model[3].weight.requires_grad_(False)
    optimizer = optim.build(OptimizerConfig(weight_decay=0.1, decay_of="weights"), model)
    decaying, others = optimizer.param_groups
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert [p is model[0].weight for p in decaying["params"]] == [True]
    exempt = (model[0].bias, *model[1].parameters(), *model[2].parameters())
    assert {id(p) for p in others["params"]} == {id(p) for p in exempt}
    (every,) = optim.build(OptimizerConfig(weight_decay=0.1), model).param_groups
    assert len(every["params"]) == 6
    optim.set_learning_rate(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]
    with pytest.raises(UsageError, match="no parameter to train"):
        optim.build(OptimizerConfig(), model.requires_grad_(False))


DECAY = 0.9
SETTINGS: dict[str, Any] = {"epochs": 2, "ema_decay": DECAY}


def final(folder: str) -> Weights:
    weights: Weights = torch.load(Path(folder) / checkpoint.FINAL, weights_only=True)
    return weights


def alone() -> Weights:
    trained(LocalWorld(), small_config(**SETTINGS, output_dir=Path("alone")), runs.batch_norm)
    return final("alone")


def test_the_moving_average_is_what_its_formula_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first weights, then 0.9 of itself and 0.1 of the new weights and statistics; it is what is evaluated."""
    monkeypatch.setattr(DiskStore, "commit", lambda store, state: store.commit_last(state).result())
    config = small_config(**SETTINGS, commit_steps=1, keep_checkpoints=100, output_dir=Path("run"))
    result, last = trained(LocalWorld(), config, runs.batch_norm)
    snapshots = [checkpoint.read(path)["model"] for path in reversed(checkpoint.committed(Path("run")))]
    assert len(snapshots) == 20
    expected = {name: value.double() for name, value in snapshots[0].items() if value.is_floating_point()}
    for weights in snapshots[1:]:
        for name, value in expected.items():
            expected[name] = DECAY * value + (1 - DECAY) * weights[name].double()
    found = final("run")
    assert max(float((found[name] - value).abs().max()) for name, value in expected.items()) <= 1e-6
    assert largest_difference(found, last) > 1e-3, "the last weights themselves"
    newest = checkpoint.committed(Path("run"))[0]
    scores = evaluate(newest, model=runs.batch_norm, data=runs.few_digits, world=LocalWorld())
    assert scores.loss == pytest.approx(result.loss, abs=1e-6)


def test_the_moving_average_is_the_same_on_ranks_stopped_and_resumed() -> None:
    expected = alone()
    run_ranks(2, lambda world: trained(world, small_config(**SETTINGS, output_dir=Path("two")), runs.batch_norm))
    assert largest_difference(final("two"), expected) <= 1e-5
    config = small_config(**SETTINGS, output_dir=Path("stopped"))
    result, _ = trained(StoppingWorld(7), config, runs.batch_norm)
    assert not result.finished
    trained(LocalWorld(), config, runs.batch_norm)
    assert equal(final("stopped"), expected)


def test_the_moving_average_survives_rank_0_and_reaches_newcomers() -> None:
    config = small_config(**SETTINGS, output_dir=Path("elastic"))
    events = [Kill(7, rank=0), Hosts(12, (("h1", 1), ("h2", 1), ("h3", 1)))]
    run_elastic(lambda world: trained(world, config, runs.batch_norm), {"h1": 1, "h2": 1}, events, first=2)
    assert largest_difference(final("elastic"), alone()) <= 1e-5


def test_the_moving_average_has_the_other_buffers_of_the_model() -> None:
    """On ranks and alone: vectors of spectral norm, counters and random states, unless they are averaged by name."""
    config = small_config(**SETTINGS, average_buffers=("0.mean",), output_dir=Path("two"))
    results = run_ranks(2, lambda world: trained(world, config, runs.remembers))
    last, found = results[0][1], final("two")
    names = {name for name, _ in runs.remembers(10).named_buffers()} - {"0.unsaved"}
    assert {name for name in names if not torch.equal(found[name], last[name])} == {"0.mean"}
    trained(LocalWorld(), config.replace(output_dir=Path("alone")), runs.remembers)
    assert largest_difference(found, final("alone")) <= 1e-5
