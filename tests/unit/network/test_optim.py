"""The optimizers: torch's own arithmetic, over the parameters that are trained."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from hvd_train.errors import UsageError
from hvd_train.network import optim
from hvd_train.settings.optimizer import OptimizerConfig
from tests.support.runs import convnet
from tests.support.worlds import own_generator

pytestmark = pytest.mark.numeric

PUBLISHED: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (Adam, {"fused": True}),
    "adamw": (AdamW, {"fused": True}),
}


def stepped(model: nn.Module, optimizer: Optimizer, steps: int) -> list[torch.Tensor]:
    """The weights after so many steps on one batch."""
    images, labels = torch.cos(torch.arange(8 * 64.0).view(8, 1, 8, 8)), torch.arange(8)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_optimizer_is_torchs_to_the_last_bit(name: str) -> None:
    """Steps, state and restored state are those of the class that torch publishes."""
    config = OptimizerConfig(optimizer=name, learning_rate=0.01, weight_decay=0.1, nesterov=name == "sgd")  # type: ignore[arg-type]
    ours, theirs, restored = (own_generator(convnet(10)) for _ in range(3))
    mine = optim.build(config, ours)
    cls, more = PUBLISHED[name]
    other = cls(theirs.parameters(), lr=0.01, weight_decay=0.1, **more)  # type: ignore[call-arg]
    assert isinstance(mine, cls)
    assert all(map(torch.equal, stepped(ours, mine, 3), stepped(theirs, other, 3)))
    again = optim.build(config, restored)
    again.load_state_dict(other.state_dict())
    restored.load_state_dict(theirs.state_dict())
    assert all(map(torch.equal, stepped(ours, mine, 2), stepped(restored, again, 2)))


def test_hooks_on_a_step_are_called() -> None:
    """What watches optimizers by torch's hooks (profilers, users) sees these, too."""
    model = own_generator(convnet(10))
    optimizer = optim.build(OptimizerConfig(), model)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    stepped(model, optimizer, 1)
    assert seen == ["before", "after"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_that_lie_in_memory_with_gaps_or_are_complex(name: str) -> None:
    """A user's own may be a view of something else, or of complex numbers: they are trained as torch trains them."""

    def odd() -> nn.Module:
        model = nn.Module()
        model.view = nn.Parameter(torch.arange(24.0).view(4, 6)[:, ::2])
        model.waves = nn.Parameter(torch.polar(torch.ones(3), torch.arange(3.0)))
        return model

    def stepped(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = None
            (model.view.pow(2) * torch.arange(12.0).view(4, 3)).sum().add(model.waves.abs().sum()).backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    cls, more = PUBLISHED[name]
    ours, theirs = odd(), odd()
    mine = optim.build(OptimizerConfig(optimizer=name, learning_rate=0.01, nesterov=name == "sgd"), ours)  # type: ignore[arg-type]
    default = OptimizerConfig()
    other = cls(theirs.parameters(), lr=0.01, weight_decay=default.weight_decay, **{**more, "fused": False})
    for one, two in zip(stepped(ours, mine), stepped(theirs, other), strict=True):
        torch.testing.assert_close(one, two)


def test_a_restored_state_has_the_memory_format_of_its_parameters() -> None:
    """A checkpoint of a run with another `--channels-last` pairs each weight with its own momentum."""
    saved, model = nn.Conv2d(3, 4, 2), nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    before, after = (optim.build(OptimizerConfig(), network) for network in (saved, model))
    for parameter, state in before.state.items():
        state["momentum_buffer"].copy_(torch.arange(float(parameter.numel())).view_as(parameter))
    after.load_state_dict(before.state_dict())
    optim.match_memory_format(after)
    momentum = after.state[model.weight]["momentum_buffer"]
    assert momentum.stride() == model.weight.stride()
    assert torch.equal(momentum, before.state[saved.weight]["momentum_buffer"])


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_without_timm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that says what to type."""
    for module in ("timm", "timm.optim.lamb", "timm.optim.lars"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=f"--optimizer {name}: timm is not installed: pip install timm"):
        optim.build(OptimizerConfig(optimizer=name), nn.Linear(2, 2))  # type: ignore[arg-type]


def test_what_decays() -> None:
    """`--decay-of weights`: neither biases nor the weights of normalisation layers, and nothing that is frozen."""
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


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_optimizers_by_name(name: str) -> None:
    """Class, weight decay, and a learning rate that is set for all parameters."""
    config = OptimizerConfig(optimizer=name, learning_rate=0.3, weight_decay=0.02)
    optimizer = optim.build(config, nn.Linear(2, 2))
    assert type(optimizer).__name__.lower() == name
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.3, 0.02)]
    optim.set_learning_rate(optimizer, 0.05)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05]


def test_only_what_is_trained_is_optimized() -> None:
    """Frozen parameters are left out; with nothing to train there is one line."""
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    assert len(optim.build(OptimizerConfig(), model).param_groups[0]["params"]) == 1
    model.bias.requires_grad_(False)
    with pytest.raises(UsageError, match="no parameter to train"):
        optim.build(OptimizerConfig(), model)


def test_the_learning_rate_is_that_of_every_group() -> None:
    """Parameters without weight decay follow the schedule as well."""
    optimizer = optim.build(OptimizerConfig(decay_of="weights"), nn.Sequential(nn.Linear(2, 2)))
    assert len(optimizer.param_groups) == 2
    optim.set_learning_rate(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


@pytest.mark.parametrize("decay_of", ["all", "weights"])
def test_lars_and_lamb_are_those_of_timm(decay_of: str) -> None:
    """With the settings that each of them has; weight decay is for the groups that decay."""
    from timm.optim.lamb import Lamb
    from timm.optim.lars import Lars

    model = nn.Sequential(nn.Linear(2, 3))
    for name, kind in (("lars", Lars), ("lamb", Lamb)):
        config = OptimizerConfig(
            optimizer=name,  # type: ignore[arg-type]
            learning_rate=0.3,
            weight_decay=0.02,
            momentum=0.7,
            nesterov=name == "lars",
            decay_of=decay_of,  # type: ignore[arg-type]
        )
        optimizer = optim.build(config, model)
        assert type(optimizer) is kind
        decays = [group["weight_decay"] for group in optimizer.param_groups]
        assert decays == ([0.02] if decay_of == "all" else [0.02, 0.0])
        assert [len(group["params"]) for group in optimizer.param_groups] == ([2] if decay_of == "all" else [1, 1])
        for group in optimizer.param_groups:
            assert group["lr"] == 0.3
            if name == "lars":
                assert (group["momentum"], group["nesterov"]) == (0.7, True)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_momenta_are_there_from_the_start(momentum: float) -> None:
    """One of zeros for each weight: a weight that is thawed later must not lack one then. Without momentum, none."""
    model = nn.Linear(2, 3)
    optimizer = optim.build(OptimizerConfig(momentum=momentum), model)
    found = [optimizer.state[parameter].get("momentum_buffer") for parameter in model.parameters()]
    if momentum:
        assert [(one.shape, bool(one.any())) for one in found] == [((3, 2), False), ((3,), False)]
    else:
        assert found == [None, None]


def test_a_step_is_fused_where_torch_can_fuse_it() -> None:
    """One pass over memory; a weight with gaps, or of complex numbers, keeps all of them from it."""
    dense, gaps = nn.Linear(2, 3), nn.Linear(2, 3)
    gaps.view = nn.Parameter(torch.zeros(4, 6)[:, ::2])
    waves = nn.Linear(2, 3)
    waves.waves = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    for name in ("sgd", "adam"):
        built = [optim.build(OptimizerConfig(optimizer=name), model) for model in (dense, gaps, waves)]  # type: ignore[arg-type]
        assert [optimizer.param_groups[0]["fused"] for optimizer in built] == [True, False, False]


def test_a_state_keeps_its_number_format_where_only_its_order_in_memory_is_wrong() -> None:
    """Counts and what has another shape than the weight stay as they are."""
    model = nn.Conv2d(3, 4, 2, bias=False).to(memory_format=torch.channels_last)
    optimizer = optim.build(OptimizerConfig(optimizer="adam"), model)
    plain = torch.arange(48.0, dtype=torch.float64).view(4, 3, 2, 2)
    step, row, right = torch.tensor(3.0), torch.arange(48.0), torch.zeros_like(model.weight)
    optimizer.state[model.weight] = {"step": step, "moment": plain, "row": row, "right": right, "name": "adam"}
    optim.match_memory_format(optimizer)
    state = optimizer.state[model.weight]
    assert (state["step"] is step, state["row"] is row, state["right"] is right) == (True, True, True)
    assert state["name"] == "adam"
    assert (state["moment"].dtype, state["moment"].stride()) == (torch.float64, model.weight.stride())
    assert torch.equal(state["moment"], plain)


def test_optimizers_that_are_known_to_work_number_by_number() -> None:
    """Others scale by norms of whole weights, or may."""
    weights = [nn.Parameter(torch.zeros(1))]
    known = (SGD(weights), Adam(weights), AdamW(weights), torch.optim.RMSprop(weights))
    assert [optim.is_elementwise(optimizer) for optimizer in known] == [True, True, True, False]
    model = nn.Linear(2, 2)
    names = ("sgd", "adam", "adamw", "lars", "lamb")
    built = {name: optim.build(OptimizerConfig(optimizer=name), model) for name in names}  # type: ignore[arg-type]
    assert [name for name in names if optim.is_elementwise(built[name])] == ["sgd", "adam", "adamw"]
