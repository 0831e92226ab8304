"""`--compile`: it changes the speed alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from hvd_train.parts import Own, warm_parts
from hvd_train.run import train
from hvd_train.updater import Updater
from hvd_train.world.world import LocalWorld
from tests.support import runs


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without generating code, which would take ten times as long."""
    plain: Callable[..., Any] = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda model: plain(model, backend="aot_eager"))
    torch.compiler.reset()
    counters.clear()


def test_compiling_leaves_the_model_as_it_was(quick: None) -> None:
    def model(num_classes: int) -> nn.Module:
        return nn.Sequential(runs.batch_norm(num_classes), nn.Dropout(0.5))

    def facts(*, compiles: bool) -> list[Any]:
        config = runs.small_config(freeze="0.0.*", compile=compiles)
        built = warm_parts(config, LocalWorld(), Own(model, runs.few_digits))[0].model
        modes = [m.training for m in built.modules()]
        gradients = [p.grad for p in built.parameters()]
        values = {name: tensor.tolist() for name, tensor in built.state_dict().items()}
        return [values, modes, gradients, torch.get_rng_state().tolist()]

    assert facts(compiles=False) == facts(compiles=True)
    assert counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize(
    "changes", [{}, {"freeze": "0.*", "precision": "bf16"}], ids=["plain", "frozen and bf16"]
)
def test_an_epoch_compiles_nothing(
    changes: dict[str, Any], quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_before: list[int] = []
    plain = Updater.begin

    def begin(*args: Any, **kwargs: Any) -> Any:
        compiled_before.append(counters["stats"]["unique_graphs"])
        return plain(*args, **kwargs)

    monkeypatch.setattr(Updater, "begin", begin)
    config = runs.small_config(epochs=2, **changes, compile=True)
    result = train(config, model=runs.batch_norm, data=runs.few_digits)
    assert result.finished
    assert compiled_before[0] > 0
    assert counters["stats"]["unique_graphs"] == compiled_before[0]
