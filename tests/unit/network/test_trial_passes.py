"""Passes before training leave everything as it was, and show what no rank is to wait for or to stumble over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvd_train import parts
from hvd_train.errors import UsageError
from hvd_train.network.trial_passes import check_deterministic, pass_once, pass_through
from hvd_train.run import train
from hvd_train.step import Steps
from tests.support import runs
from tests.support.tasks import trial_of


class Unpooled(nn.Module):
    """A model with an operator that torch has in no deterministic form, on CPUs neither."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
        self.layer = nn.Linear(64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layer(self.unpool(*self.pool(images)).flatten(1))
        return logits


def noisy(num_classes: int) -> nn.Module:
    """A model with running statistics and random numbers."""
    torch.manual_seed(3)
    return nn.Sequential(runs.batch_norm(10), nn.Dropout(0.5))


def test_passes_change_nothing() -> None:
    """Weights, running statistics, gradients, modes and random numbers are as before."""
    model, example = noisy(10), torch.randn(2, 1, 8, 8)
    model[0][1].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes, numbers = [module.training for module in model.modules()], torch.get_rng_state()
    pass_through(trial_of(model, example), train_sizes=[4, 3], eval_sizes=[5])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    pass_once(trial_of(model, example))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_training_after_first_passes_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a newcomer does before it meets the others is seen in no weight, and is done before the first step."""
    models: list[nn.Module] = []
    seen: list[int] = []
    passes: list[Tensor] = []

    def build(num_classes: int) -> nn.Module:
        models.append(noisy(num_classes))
        models[-1].register_forward_hook(lambda module, inputs, logits: passes.append(logits))
        return models[-1]

    plain = Steps.begin

    def begin(*args: Any, **kwargs: Any) -> Any:
        seen.append(len(passes))
        return plain(*args, **kwargs)

    monkeypatch.setattr(Steps, "begin", begin)
    first = []
    for slow in (False, True):
        monkeypatch.setattr(parts, "first_step_is_slow", lambda device, slow=slow: slow)
        passes.clear()
        seen.clear()
        config = runs.small_config(epochs=2, resume="never")
        assert train(config, model=build, data=runs.few_digits).finished
        first.append(seen[0])
    assert first[0] == 1, "to see whether the model fits"
    assert first[1] > 1
    assert runs.equal(models[0].state_dict(), models[1].state_dict())


def test_a_model_that_cannot_repeat_itself_is_refused() -> None:
    """Before the start, by one line that names the operator; without --deterministic it trains."""
    model, example = Unpooled(10), torch.randn(2, 1, 8, 8)
    check_deterministic(trial_of(model, example), "mine:unpooled")
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(UsageError, match=r"--deterministic: model mine:unpooled needs max_unpooling2d_forward_out"):
            check_deterministic(trial_of(model, example), "mine:unpooled")
        config = runs.small_config(deterministic=True)
        with pytest.raises(UsageError, match="--deterministic: model"):
            train(config, model=Unpooled, data=runs.few_digits)
        check_deterministic(trial_of(noisy(10), example), "noisy")
    finally:
        torch.use_deterministic_algorithms(False)
