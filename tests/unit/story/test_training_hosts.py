"""What elastic training guarantees as hosts come and go, and what it tells of that."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.optim import Optimizer

from hvd_train.run_files.ledger import audit
from hvd_train.world.world import Reduction
from tests.support.elastic import ElasticThreadWorld, Event, Hosts, Kill, Tell, run_elastic
from tests.support.fault_plays import ONE, THREE, TWO, check, events_of, play, undisturbed
from tests.support.runs import small_config, trained


@pytest.mark.parametrize(
    ("events", "hosts", "sizes"),
    [
        ([Hosts(5, (ONE, TWO))], (ONE,), {1, 2}),
        ([Hosts(5, (ONE,))], (ONE, TWO, THREE), {3, 1}),
        ([Hosts(5, (TWO,))], (ONE, TWO), {2, 1}),
        ([Hosts(5, (TWO, THREE))], (ONE, TWO), {2}),
        ([Hosts(4, (TWO, THREE)), Hosts(9, (ONE, TWO, THREE)), Hosts(15, (ONE,))], (ONE, TWO), {2, 3, 1}),
        ([Hosts(5, (("h1", 3),))], (("h1", 1),), {1, 3}),
        ([Tell(5, 0)], (ONE, TWO, THREE), {3, 2}),
        ([Tell(5, 1), Tell(6, 0), Kill(12, 0), Hosts(12, (ONE, TWO, THREE))], (ONE, TWO, THREE), {3, 2, 1}),
    ],
    ids=str,
)
def test_hosts_come_and_go(events: list[Event], hosts: tuple[tuple[str, int], ...], sizes: set[int]) -> None:
    """Nobody's samples are lost or seen twice, also when the host of rank 0 is taken from the list or told to end."""
    job, folder = play(events, *hosts)
    check(job, folder, undisturbed())
    assert sizes <= set(job.sizes)


def test_below_the_fewest_and_back() -> None:
    """With fewer workers than --min-np the survivors wait for another (horovod issue #3494 deadlocks there)."""
    job, folder = play([Kill(6, rank=1)], ONE, TWO, fewest=2)
    check(job, folder, undisturbed())
    assert job.sizes == [2, 2]


@pytest.mark.parametrize(
    "batch",
    [
        {"global_batch_size": 20, "batch_size": 5, "accumulation_steps": 2},
        {"global_batch_size": None, "batch_size": 5, "accumulation_steps": 2},
    ],
    ids=str,
)
def test_a_newcomer_takes_the_cut_of_the_run(batch: dict[str, Any]) -> None:
    """It is not turned away because the same settings would make another one on so many workers."""
    job, folder = play([Hosts(5, (ONE, TWO, THREE))], ONE, TWO, **batch)
    check(job, folder, undisturbed(global_batch_size=20, batch_size=5))
    assert 3 in job.sizes


def test_a_worker_whose_share_exceeds_the_data_may_join() -> None:
    """With --on-resize per-worker the global batch grows to the whole training set at most."""
    settings = {"on_resize": "per-worker", "lr_scaling": "linear", "global_batch_size": None, "batch_size": 80}
    config = small_config(epochs=4, ledger=True, **settings)
    job = run_elastic(lambda world: trained(world, config), {"h1": 1, "h2": 1}, [Hosts(2, (ONE, TWO, THREE))], first=2)
    assert audit(Path("run")).faults == ()
    assert 3 in job.sizes


def test_per_worker_batches_follow_the_world() -> None:
    """With --on-resize per-worker a step takes as many samples per worker as before."""
    settings = {"on_resize": "per-worker", "lr_scaling": "linear", "global_batch_size": None, "batch_size": 10}
    folder = Path("run")
    config = small_config(epochs=2, ledger=True, output_dir=folder, **settings)
    job = run_elastic(lambda world: trained(world, config), {"h1": 1, "h2": 1}, [Kill(4, rank=1)], first=2, most=2)
    assert audit(folder).faults == ()
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    full = [line for line, after in itertools.pairwise(lines) if line["epoch"] == after["epoch"]]
    assert {(line["positions"][1] - line["positions"][0]) / line["world_size"] for line in full} == {10}
    assert {line["world_size"] for line in lines} == {1, 2}
    assert job.finish is not None


def test_the_wait_for_a_newcomer_is_told() -> None:
    """The seconds to the next step count what the newcomer does after the ranks have met, to the end of that step."""
    delays = [0.5]

    class Slow(ElasticThreadWorld):
        def wrap(self, optimizer: Optimizer, model: nn.Module, reduction: Reduction) -> Optimizer:
            if self.place.size == 2 and delays:
                time.sleep(delays.pop())
            return super().wrap(optimizer, model, reduction)

    _, folder = play([Hosts(5, (ONE, TWO))], ONE, kind=Slow)
    (joined,) = events_of(folder)
    assert not delays
    assert joined["seconds"] >= 0.5


def test_the_user_is_told_of_each_change() -> None:
    """Old and new size, why, seconds and steps lost stand in metrics.jsonl."""
    _, folder = play([Kill(7, rank=1)], ONE, TWO, most=2)
    first, *_ = events_of(folder)
    assert (first["previous_size"], first["world_size"], first["step"]) == (2, 1, 7)
    assert first["why"] == "a rank was lost"
    assert 0 < first["seconds"] < 30
