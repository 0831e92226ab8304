"""A rank whose memory has changed by itself is found before any of it is kept, and all go back to what was good."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hvd_train import checkpoint, loop
from hvd_train.errors import ReplicasDiffer
from hvd_train.job import Clocks
from hvd_train.progress.clock import Timer
from tests.support import runs
from tests.support.runs import small_config, trained
from tests.support.worlds import ThreadWorld, run_ranks

Spoil = Callable[[nn.Module], None]


def spoiled(world: ThreadWorld, rank: int, passes: range, spoil: Spoil) -> Callable[[int], nn.Module]:
    """Return what makes a model that on one rank is spoiled after some of its training passes (counted from 1)."""

    def make(num_classes: int) -> nn.Module:
        model, done = runs.convnet(num_classes), 0

        def count(module: nn.Module, *_: object) -> None:
            nonlocal done
            done += module.training
            if world.place.rank == rank and module.training and done in passes:
                spoil(model)

        model.register_forward_hook(count)
        return model

    return make


def flip_a_bit(model: nn.Module) -> None:
    """Flip the lowest bit of the exponent of one weight."""
    model.get_parameter("4.weight").data.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 23)


def drift(model: nn.Module) -> None:
    """Add something to one weight."""
    model.get_parameter("4.weight").data.view(-1)[:1] += 0.5


def events(kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, Path("run/metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line.get("name") == kind]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_flipped_bit_leaves_no_trace_in_the_result(ranks: int) -> None:
    """All ranks go back to the last commit, which was compared before; the weights are those of an undisturbed run."""
    config = small_config(commit_steps=7, keep_checkpoints=100, best_by="loss")
    flipped = range(21, 22)
    results = run_ranks(ranks, lambda world: trained(world, config, spoiled(world, 1, flipped, flip_a_bit)))
    undisturbed = run_ranks(ranks, lambda world: trained(world, config.replace(output_dir=Path("undisturbed"))))
    for (result, weights), (expected, expected_weights) in zip(results, undisturbed, strict=True):
        assert runs.equal(weights, expected_weights)
        assert (result.scores, result.best, result.best_epoch) == (expected.scores, expected.best, expected.best_epoch)
    for name in ("model-best.pt", "model-final.pt"):
        of_run, of_undisturbed = (torch.load(Path(run) / name, weights_only=True) for run in ("run", "undisturbed"))
        assert runs.equal(of_run, of_undisturbed)
    for file in checkpoint.committed(Path("run")):
        expected = checkpoint.read(Path("undisturbed/checkpoints") / file.name)
        assert runs.equal(checkpoint.read(file)["model"], expected["model"])


def test_the_rank_that_differs_is_named_with_its_host_and_what_differs() -> None:
    """In the record of the change, which stays though the steps after the commit are taken again."""
    config = small_config(commit_steps=5, epochs=2)
    run_ranks(3, lambda world: trained(world, config, spoiled(world, 1, range(13, 14), flip_a_bit)))
    (change,) = events("world")
    assert "most ranks hold the same state, but not rank 1 on " in change["message"]
    assert "4.weight" in change["message"]


def test_states_are_compared_between_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the last comparison is old enough, so that less has to be taken again."""
    monkeypatch.setattr(Clocks, "of", lambda config: Clocks(Timer(None), Timer(None), check_timer=Timer(1e-9)))
    monkeypatch.setattr(loop, "LEAST_PAUSE", 0)
    config = small_config(epochs=2, commit_steps=6)
    run_ranks(3, lambda world: trained(world, config, spoiled(world, 1, range(13, 14), flip_a_bit)))
    (change,) = events("world")
    assert "after step 7 most ranks" in change["message"]
    assert change["steps_lost"] == 1


def test_without_a_commit_the_job_ends_and_keeps_nothing() -> None:
    """There is nothing to go back to: one line says so on all ranks, and no file of the spoiled state is left."""

    def body(world: ThreadWorld) -> None:
        with pytest.raises(ReplicasDiffer, match=r"not rank 1 on .* no checkpoint yet .*same command to start anew"):
            trained(world, small_config(epochs=1), spoiled(world, 1, range(3, 4), flip_a_bit))

    run_ranks(3, body)
    assert checkpoint.committed(Path("run")) == []
    assert not list(Path("run").glob("model-*.pt"))


def test_a_rank_that_is_always_another_ends_the_job() -> None:
    """It is no accident: the third time all ranks give up, with what to look at; the newest commit is a right one."""
    config = small_config(commit_steps=5, epochs=3)

    def body(world: ThreadWorld) -> None:
        with pytest.raises(ReplicasDiffer, match="the third time: look for a program that treats ranks differently"):
            trained(world, config, spoiled(world, 1, range(20, 10**6), drift))

    run_ranks(3, body)
    (newest, *_) = checkpoint.committed(Path("run"))
    undisturbed = small_config(commit_steps=5, epochs=3, output_dir=Path("undisturbed"), keep_checkpoints=100)
    run_ranks(3, lambda world: trained(world, undisturbed))
    expected = checkpoint.read(Path("undisturbed/checkpoints") / newest.name)
    assert runs.equal(checkpoint.read(newest)["model"], expected["model"])
