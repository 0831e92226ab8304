"""Trainings whose slots are dealt by speed."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from hvd_train.progress import balance
from hvd_train.run_files.ledger import audit
from tests.support import runs
from tests.support.runs import small_config, trained
from tests.support.worlds import ThreadWorld, run_ranks


@pytest.mark.parametrize("workers", [0, 1])
def test_a_training_with_a_slow_rank_is_the_same_one(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots move to faster ranks again and again; each sample counts once, and the weights are those of one rank."""
    monkeypatch.setattr(balance, "PAUSE_S", 0)
    monkeypatch.setattr(balance, "STRETCH_S", 0)
    data = {"data": "tests.support.runs:mapped_digits"} if workers else {}
    config = small_config(
        epochs=3, commit_steps=7, global_batch_size=48, log_steps=2, ledger=True, workers=workers, **data
    )
    (alone,) = run_ranks(1, lambda world: trained(world, config.replace(output_dir=Path("alone"))))

    taken = [0, 0, 0]

    def sleepy(world: ThreadWorld) -> tuple[object, dict[str, torch.Tensor]]:
        def make(num_classes: int) -> nn.Module:
            model = runs.convnet(num_classes)

            def sleep(module: nn.Module, *_: object) -> None:
                taken[world.place.rank] += module.training
                slow = 1 if taken[world.place.rank] < 20 else 2
                time.sleep(0.02 if world.place.rank == slow else 0.005)

            model.register_forward_pre_hook(sleep)
            return model

        return trained(world, config.replace(balance=True), make)

    for _, weights in run_ranks(3, sleepy):
        assert runs.largest_difference(weights, alone[1]) < 1e-5
    events = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    deals = [event["slots"] for event in events if event.get("name") == "balance"]
    assert deals
    assert all(sum(slots) == 12 and min(slots) >= 1 for slots in deals)
    assert any(slots[1] < 4 for slots in deals)
    assert len(set(taken)) > 1, "slots were dealt otherwise, but nobody has taken them"
    found = audit(Path("run"))
    assert (found.faults, found.epochs) == ((), 3)
