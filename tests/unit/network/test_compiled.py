"""`--compile`: it changes the speed alone."""

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
    plain = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda model: plain(model, backend="aot_eager"))
    torch.compiler.reset()
    counters.clear()


def test_compiling_leaves_the_model_as_it_was(quick: None) -> None:
    def model(num_classes):
        return nn.Sequential(runs.batch_norm(num_classes), nn.Dropout(0.5))

    def facts(*, compiles):
        config = runs.small_config(freeze="0.0.*", compile=compiles)
        built = warm_parts(config, LocalWorld(), Own(model, runs.few_digits))[0].model
        return [
            [module.training for module in built.modules()],
            [parameter.grad for parameter in built.parameters()],
            [tensor.tolist() for tensor in built.state_dict().values()],
            torch.get_rng_state().tolist(),
        ]

    assert facts(compiles=False) == facts(compiles=True)
    assert counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize(
    "changes", [{}, {"freeze": "0.*", "precision": "bf16"}], ids=["plain", "frozen and bf16"]
)
def test_an_epoch_compiles_nothing(
    changes: dict[str, Any], quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    plain = Updater.begin

    def begin(*args, **kwargs):
        compiled.append(counters["stats"]["unique_graphs"])
        return plain(*args, **kwargs)

    monkeypatch.setattr(Updater, "begin", begin)
    config = runs.small_config(epochs=2, **changes, compile=True)
    assert train(config, model=runs.batch_norm, data=runs.few_digits).finished
    assert compiled[0] > 0
    assert counters["stats"]["unique_graphs"] == compiled[0]
