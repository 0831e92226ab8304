"""`--compile`: it changes the speed alone."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from hvd_train.network.models import warm_up
from hvd_train.run import train
from hvd_train.updater import Updater
from tests.support import runs


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without generating code, which would take ten times as long."""
    plain: Callable[..., Any] = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda model: plain(model, backend="aot_eager"))
    torch.compiler.reset()


def compiled(model: nn.Module, train_sizes: list[int], eval_sizes: list[int]) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def example(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(size, 1, 8, 8), torch.zeros(size, dtype=torch.long)

    sizes = {"train_sizes": train_sizes, "eval_sizes": eval_sizes}
    model.compile()
    warm_up(model, example, nullcontext(), loss=loss, evaluate=loss, **sizes)


def test_compiling_leaves_the_model_as_it_was(quick: None) -> None:
    model = nn.Sequential(runs.batch_norm(10), nn.Dropout(0.5))
    model[0][1].eval()
    model[0][0].weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes, numbers = [module.training for module in model.modules()], torch.get_rng_state()
    compiled(model, [4, 3], [5])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("changes", [{}, {"freeze": "0.*", "precision": "bf16"}], ids=["plain", "frozen and bf16"])
def test_an_epoch_compiles_nothing(changes: dict[str, Any], quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_before: list[int] = []
    plain = Updater.begin

    def begin(*args: Any, **kwargs: Any) -> Any:
        compiled_before.append(counters["stats"]["unique_graphs"])
        return plain(*args, **kwargs)

    monkeypatch.setattr(Updater, "begin", begin)
    counters.clear()
    config = runs.small_config(epochs=2, **changes, compile=True)
    result = train(config, model=runs.batch_norm, data=runs.few_digits)
    assert result.finished
    assert compiled_before[0] > 0
    assert counters["stats"]["unique_graphs"] == compiled_before[0]
