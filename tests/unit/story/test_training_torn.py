"""Weights that no rank can be trusted with, and what is done for the last whole ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.optim import Optimizer
from typing_extensions import override

from hvd_train import checkpoint
from hvd_train.errors import ReplicasDiffer
from hvd_train.state import TrainState
from hvd_train.world.gradient import Gradient
from hvd_train.world.world import LocalWorld
from tests.support.elastic import ElasticThreadWorld, Kill, Unheard, run_elastic
from tests.support.fault_plays import TOLERANCE
from tests.support.runs import largest_difference, small_config, trained


class HalfASum(ElasticThreadWorld):
    """A reduction that is reported as done has given one rank other weights, in the third step."""

    @override
    @contextmanager
    def reduced(self, optimizer: Optimizer) -> Iterator[Gradient]:
        with super().reduced(optimizer) as gradient:
            yield gradient
        if self._job.sizes == [3] and self.place.rank == 1 and self._steps == 3:
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.data += 0.01


def test_survivors_that_differ_have_nothing_to_go_on_from_before_the_first_commit() -> None:
    """The job ends and says why; none of the two states is committed as if it were the right one."""
    config = small_config(epochs=1)
    with pytest.raises(ReplicasDiffer, match=r"hold different weights \(a rank was lost\), and there is no check"):
        run_elastic(lambda world: trained(world, config), {"h1": 3}, [Kill(4, rank=2)], first=3, most=3, kind=HalfASum)
    assert checkpoint.committed(Path("run")) == []


def test_survivors_that_differ_go_back_to_the_last_commit() -> None:
    """The step with the false sum is taken again, and so is what came before it and was not committed."""
    config = small_config(epochs=1, commit_steps=2, keep_checkpoints=100)
    job = run_elastic(
        lambda world: trained(world, config), {"h1": 3}, [Kill(4, rank=2)], first=3, most=3, kind=HalfASum
    )
    undisturbed = trained(LocalWorld(), config.replace(output_dir=Path("undisturbed")))[1]
    assert largest_difference(job.results[0][1], undisturbed) <= TOLERANCE


def test_a_rank_0_that_comes_apart_in_a_meeting_does_not_commit_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was behind, and has not become what the others are: a commit of it would be taken for good."""
    load = TrainState.load_buffers

    def load_otherwise(state: TrainState, values: Any) -> None:
        load(state, values)
        if state.progress.step:  # not in the first meeting
            state.model.get_parameter("4.bias").data += 1

    monkeypatch.setattr(TrainState, "load_buffers", load_otherwise)
    with pytest.raises(ReplicasDiffer, match=r"differ: rank 1 in 4\.bias; what rank 0 holds is NOT committed"):
        run_elastic(
            lambda world: trained(world, small_config(epochs=1)), {"h1": 2}, [Unheard(4, rank=0)], first=2, most=2
        )
    assert checkpoint.committed(Path("run")) == []
