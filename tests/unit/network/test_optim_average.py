"""The moving average of weights: its numerics, and that it survives whatever the weights survive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_train import checkpoint
from hvd_train.checkpoint import DiskStore
from hvd_train.network.optim import moving_average
from hvd_train.run import evaluate
from hvd_train.settings.optimizer import OptimizerConfig
from hvd_train.world.world import LocalWorld
from tests.support import runs
from tests.support.elastic import Hosts, Kill, run_elastic
from tests.support.runs import Weights, equal, largest_difference, small_config, trained
from tests.support.worlds import StoppingWorld, run_ranks

pytestmark = pytest.mark.numeric

DECAY = 0.9
SETTINGS: dict[str, Any] = {"epochs": 2, "ema_decay": DECAY}


def final(folder: str) -> Weights:
    """The final weights of a run."""
    weights: Weights = torch.load(Path(folder) / checkpoint.FINAL, weights_only=True)
    return weights


def alone() -> Weights:
    """Those of the training that the others are compared with."""
    trained(LocalWorld(), small_config(**SETTINGS, output_dir=Path("alone")), runs.batch_norm)
    return final("alone")


def test_the_average_is_what_its_formula_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first step the weights; then 0.9 of itself and 0.1 of the new weights and statistics, each step."""
    monkeypatch.setattr(DiskStore, "commit", lambda store, state: store.commit_last(state).result())
    config = small_config(**SETTINGS, commit_steps=1, keep_checkpoints=100, output_dir=Path("run"))
    _, last = trained(LocalWorld(), config, runs.batch_norm)
    snapshots = [checkpoint.read(path)["model"] for path in reversed(checkpoint.committed(Path("run")))]
    assert len(snapshots) == 20
    expected = {name: value.double() for name, value in snapshots[0].items() if value.is_floating_point()}
    for weights in snapshots[1:]:
        for name, value in expected.items():
            expected[name] = DECAY * value + (1 - DECAY) * weights[name].double()
    found = final("run")
    assert max(float((found[name] - value).abs().max()) for name, value in expected.items()) <= 1e-6
    assert largest_difference(found, last) > 1e-3, "the last weights themselves"


def test_the_average_is_what_is_evaluated() -> None:
    """The run's scores are those of the weights it has kept, and a checkpoint's as well."""
    config = small_config(**SETTINGS, commit_steps=1, output_dir=Path("run"))
    result, _ = trained(LocalWorld(), config, runs.batch_norm)

    def scores(path: str) -> float:
        return evaluate(Path(path), model=runs.batch_norm, data=runs.few_digits, world=LocalWorld())["loss"]

    newest = checkpoint.committed(Path("run"))[0]
    assert scores(str(newest)) == pytest.approx(result.scores["loss"], abs=1e-6)


def test_ranks_and_one() -> None:
    """Two ranks come to the average of one, and hold the same bits."""
    run_ranks(2, lambda world: trained(world, small_config(**SETTINGS, output_dir=Path("two")), runs.batch_norm))
    assert largest_difference(final("two"), alone()) <= 1e-5


def test_stopped_and_resumed() -> None:
    """In mid epoch, and bit-identical."""
    config = small_config(**SETTINGS, output_dir=Path("stopped"))
    result, _ = trained(StoppingWorld(7), config, runs.batch_norm)
    assert not result.finished
    trained(LocalWorld(), config, runs.batch_norm)
    assert equal(final("stopped"), alone())


def test_it_survives_the_rank_that_writes_and_reaches_newcomers() -> None:
    """Elastic: rank 0 dies, another host joins."""
    config = small_config(**SETTINGS, output_dir=Path("elastic"))
    events = [Kill(7, rank=0), Hosts(12, (("h1", 1), ("h2", 1), ("h3", 1)))]
    run_elastic(lambda world: trained(world, config, runs.batch_norm), {"h1": 1, "h2": 1}, events, first=2)
    assert largest_difference(final("elastic"), alone()) <= 1e-5


def test_buffers_that_have_no_mean_over_slots_are_those_of_the_model() -> None:
    """On ranks and alone: vectors of spectral norm, counters and random states; what is averaged by name, is not."""
    config = small_config(**SETTINGS, average_buffers=("0.mean",), output_dir=Path("two"))
    results = run_ranks(2, lambda world: trained(world, config, runs.remembers))
    last, found = results[0][1], final("two")
    names = {name for name, _ in runs.remembers(10).named_buffers()} - {"0.unsaved"}
    assert {name for name in names if not torch.equal(found[name], last[name])} == {"0.mean"}
    trained(LocalWorld(), config.replace(output_dir=Path("alone")), runs.remembers)
    assert largest_difference(found, final("alone")) <= 1e-5


def test_an_average_begins_as_the_model_and_then_follows_it() -> None:
    """By the rest of the decay at each update, weights and running statistics alike; other buffers are copied."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), runs.Remembers())
    assert moving_average(OptimizerConfig(), model) is None
    average = moving_average(OptimizerConfig(ema_decay=0.75), model, ("1.mean",))
    assert average is not None

    def set_all(value: float) -> None:
        with torch.no_grad():
            for tensor in (model[0].weight, model[0].running_mean, model[1].mean, model[1].table):
                tensor.fill_(value)

    found = []
    for value in (4.0, 8.0):
        set_all(value)
        average.update_parameters(model)
        of = average.module
        found.append([float(t.mean()) for t in (of[0].weight, of[0].running_mean, of[1].mean, of[1].table)])
    assert found == [[4.0] * 4, [5.0, 5.0, 5.0, 8.0]]
