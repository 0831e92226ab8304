"""The times of ranks as they travel with a step, and what is told of them in a training."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hvd_train import rank_times
from hvd_train.config import Config
from hvd_train.progress import slow_ranks
from hvd_train.progress.clock import PHASES, Split
from hvd_train.progress.slow_ranks import COLUMNS
from hvd_train.rank_times import OwnTimes, TimesOfRanks
from hvd_train.step import StepResult, Votes
from hvd_train.world.world import LocalWorld, Place, World
from tests.support.runs import convnet, small_config, trained
from tests.support.steps import TaskSteps
from tests.support.worlds import ThreadWorld, run_ranks
from tests.unit.story.test_step import batch, meter_of_classes, state_of

CPU = torch.device("cpu")


class Clock:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def step_of(clock: Clock, own: OwnTimes, samples: int, **seconds: float) -> None:
    """Take a step of phases of this length; the samples are counted when it begins."""
    own.took(samples)
    for phase, length in seconds.items():
        clock.time += length
        own.split.mark(phase)


def test_a_rank_tells_means_of_whole_steps() -> None:
    """Of its phases, of the time that it stood in line for a core, and of its samples; the first time nothing."""
    clock, queued = Clock(), Clock()
    own = OwnTimes(Split(clock), queued)
    assert own.tell() == (0.0,) * len(COLUMNS)
    step_of(clock, own, 4, forward=1.0, reduction=2.0, optimizer=0.5)
    step_of(clock, own, 2, forward=3.0, reduction=2.0, optimizer=0.5)
    queued.time += 0.25
    first = dict(zip(COLUMNS, own.tell(), strict=True))
    # What comes after the second reduction belongs to the next time: a GPU may still be at it.
    assert (first["forward"], first["reduction"], first["optimizer"]) == (4.0, 4.0, 0.5)
    step_of(clock, own, 2, forward=1.0, reduction=2.0, optimizer=0.5)
    step_of(clock, own, 1, forward=3.0, reduction=2.0, optimizer=0.5)
    queued.time += 0.5
    second = dict(zip(COLUMNS, own.tell(), strict=True))
    expected = {"forward": 2.0, "reduction": 2.0, "optimizer": 0.5, "queued": 0.25, "samples": 1.5}
    assert second == {**dict.fromkeys(COLUMNS, 0.0), **expected}


def test_a_rank_that_tells_does_not_wait_for_its_gpu() -> None:
    """Of stamps in the queue of a GPU only those are read that it has passed when the host has read the sums."""
    passed = -1
    marks: list[int] = []

    def stamp() -> int:
        marks.append(len(marks))
        return marks[-1]

    def seconds(end: int, start: int) -> float:
        assert end <= passed, "the host would wait"
        return float(end - start)

    own = OwnTimes(Split(stamp, seconds), lambda: 0.0)
    own.tell()
    for phase in ("data", "forward", "backward", "reduction"):
        own.split.mark(phase)
    passed = marks[-1]
    for phase in ("optimizer", "other", "data", "forward", "backward"):
        own.split.mark(phase)
    own.tell()


@pytest.mark.parametrize(("seconds", "apart"), [(0.001, 100), (0.0099, 26), (0.1, 3), (7.0, 1)])
def test_ranks_tell_four_times_a_second_at_most(seconds: float, apart: int) -> None:
    """Of short steps not each logged one, but one in a hundred at least; all find the same in what all have told."""
    own, told = OwnTimes(Split()), np.zeros((2, len(COLUMNS)))
    assert own.is_due(1)
    own.heard(told, 40)
    assert own.is_due(41), "in the first step of a world nobody has anything to tell"
    told[1, :2] = seconds / 2
    assert own.heard(told, 50) == 10
    assert [own.is_due(50 + apart - 1), own.is_due(50 + apart)] == [False, True]
    assert own.heard(told, 50 + 2 * apart) == 2 * apart


def step_with(world: World, times: tuple[float, ...]) -> StepResult:
    """Take a step in which a rank tells these times, with two slots over all ranks."""
    model = convnet(10)
    steps = TaskSteps(Config(), world, model, CPU, meter_of_classes())
    part = batch(8, 4, world.place.rank, world.place.size)
    with steps.steps.begin(state_of(world, model), part, Votes(), want_norm=False, times=times) as step:
        for slot in step:
            steps.passes.through(slot)
        step.finish()
    return step.result


def test_the_times_of_all_ranks_come_with_the_step() -> None:
    """To each of them, exactly, from a rank without a slot as well."""

    def body(world: ThreadWorld) -> Any:
        own = tuple(world.place.rank + number / 16 for number in range(len(COLUMNS)))
        result = step_with(world, own)
        assert result.times is not None
        assert step_with(world, ()).times is None, "in steps that are not logged"
        return result.times.tolist(), result.totals

    (first, totals), *others = run_ranks(3, body)
    assert first == [[rank + number / 16 for number in range(len(COLUMNS))] for rank in range(3)]
    assert all(other == (first, totals) for other in others)
    assert totals.count == 8


def test_one_rank_alone_has_nothing_to_tell() -> None:
    """Nothing travels, and nothing comes back."""
    assert step_with(LocalWorld(), (1.0,) * len(COLUMNS)).times is None
    assert TimesOfRanks(Place(), CPU).size == 0


def test_what_travels_has_one_size_which_is_that_of_the_world() -> None:
    """Horovod's ranks agree anew on a sum of another size; a thousand ranks add less than 40 KB to their gradients."""
    of_ranks = TimesOfRanks(Place(5, 1024), CPU)
    own = of_ranks.told((1.0,) * len(COLUMNS))
    assert own.numel() == of_ranks.told(()).numel() == of_ranks.size
    assert own.numel() * own.element_size() < 40_000
    assert of_ranks.heard(own)[5].tolist() == [1.0] * len(COLUMNS)
    assert of_ranks.heard(own).sum() == len(COLUMNS)


class Sleeping(nn.Module):
    """A network whose forward pass of training takes longer in one thread."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.body, self.seconds = nn.Linear(64, 10), seconds
        nn.init.zeros_(self.body.weight)
        nn.init.zeros_(self.body.bias)

    def forward(self, images: Tensor) -> Tensor:
        """The logits."""
        time.sleep(self.seconds if self.training else 0.0)
        logits: Tensor = self.body(images.flatten(1))
        return logits


def test_a_training_names_its_slow_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Once, on the console and in metrics.jsonl, whose steps have the spread over the ranks."""
    monkeypatch.setattr(slow_ranks, "STRETCH_S", 0.05)
    monkeypatch.setattr(rank_times, "_APART_S", 0.0)
    config = small_config(epochs=2, global_batch_size=20, batch_size=10, log_steps=2)

    def body(world: ThreadWorld) -> None:
        trained(world, config, lambda _: Sleeping(0.03 if world.place.rank == 1 else 0.002))

    run_ranks(2, body)
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    (slow,) = [line for line in lines if line.get("name") == "slow"]
    assert (slow["rank"], slow["cause"], slow["recovered"]) == (1, "compute", False)
    assert capsys.readouterr().out.count("is slow in its forward and backward passes") == 1
    first, *steps = [line for line in lines if line["kind"] == "step"]
    assert first["ranks"] is None, "before the first step that is told of there is nothing to tell"
    assert steps
    for step in steps:
        least, median, most, rank = step["ranks"]["forward"]
        assert least == median < most
        assert rank == 1
        assert {*step["ranks"]} == {"work", *PHASES}
