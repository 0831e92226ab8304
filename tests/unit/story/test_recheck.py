"""Ranks compute micro-batches of one another again, so that a wrong machine is found."""

import functools
import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvd_train.recheck import Pass, Passes, differences, rounding, wrong_rank
from hvd_train.run_files.ledger import audit
from tests.support import runs
from tests.support.elastic import (
    NUMBERS,
    ONE,
    STEPS,
    THREE,
    TOLERANCE,
    TWO,
    ElasticThreadWorld,
    Job,
    Kill,
    run_elastic,
    undisturbed,
)
from tests.support.launching import json_lines
from tests.support.runs import largest_difference, small_config, trained

PLAIN = functools.cache(undisturbed)


def play(
    wrong: Any, *hosts: tuple[str, int], factor: float = 1.5, **settings: Any
) -> tuple[Job, Path]:
    """Train 20 steps, with a comparison in each fifth; `wrong(world, call)` says whether the
    gradient of this call of a hook, counted in each worker, is wrong, by this factor.
    """
    folder = Path(f"run-{next(NUMBERS)}")
    config = small_config(
        epochs=2, ledger=True, output_dir=folder, recheck_steps=5, commit_steps=2, **settings
    )

    def body(world: ElasticThreadWorld) -> Any:
        calls = itertools.count()

        def spoil(gradient: Tensor) -> Tensor:
            return gradient * factor if wrong(world, next(calls)) else gradient

        def make(num_classes: int) -> nn.Module:
            model = runs.convnet(num_classes)
            model.get_parameter("0.weight").register_hook(spoil)
            return model

        return trained(world, config, make)

    return run_elastic(body, dict(hosts), first=len(hosts)), folder


def events(folder: Path) -> list[str]:
    lines = json_lines(folder / "metrics.jsonl")
    return [line["message"] for line in lines if line.get("name") == "recheck"]


def check(job: Job, folder: Path) -> None:
    assert job.finish is not None
    assert job.finish.exit_code == 0
    report = audit(folder)
    assert (report.faults, report.epochs, report.steps) == ((), 2, STEPS)
    assert all(largest_difference(weights, PLAIN()) <= TOLERANCE for _, weights in job.results)


@pytest.mark.parametrize("turn", [0, 1], ids=["in the pass for another rank", "in its own"])
def test_a_step_with_a_wrong_gradient_is_taken_again(turn: int) -> None:
    seen = set[int]()

    def wrong(world: ElasticThreadWorld, call: int) -> bool:
        if world.place.rank != 1 or world._step != 5 or len(seen) > turn:
            return False
        seen.add(call)
        return len(seen) > turn

    job, folder = play(wrong, ONE, TWO)
    check(job, folder)
    [event] = events(folder)
    assert re.match(r"rank [01] on \w+ and rank [01] on \w+ computed micro-batch", event)
    assert re.search(r"of step 5 \(by \S+ of the gradient's norm, in 0.weight\) differently", event)
    assert job.sizes == [2]


def test_a_rank_that_computes_wrongly_leaves_and_its_steps_are_taken_again() -> None:
    """It begins in the eighth step; the comparison of the tenth finds it."""
    job, folder = play(
        lambda world, _: world._job.roster.worker(world._number).host == "h2" and world._step >= 8,
        ONE,
        TWO,
        THREE,
    )
    check(job, folder)
    assert {worker.host for worker in job.roster.world} == {"h1", "h3"}
    distrusted = {path.name[5:15] for path in folder.glob("checkpoints/*.distrusted")}
    assert distrusted
    assert min(map(int, distrusted)) > 5
    assert any(event.startswith("rank 1 on") and "twice" in event for event in events(folder))


def test_two_ranks_resume_once_if_one_computes_wrongly() -> None:
    """Neither knows which of them it is; the second time the job ends."""
    job, _ = play(lambda world, _: world.place.rank == 1 and world._step >= 8, ONE, TWO)
    assert job.finish is not None
    assert job.finish.exit_code == 4


@pytest.mark.parametrize("factor", [1.5, 1 + 1e-6], ids=["a fault", "rounding"])
def test_newcomers_decide_as_survivors_about_a_difference(factor: float) -> None:
    """Rank 2 dies in the second attempt at the step; another worker takes its place."""
    calls = Counter[int]()

    def wrong(world: ElasticThreadWorld, _: int) -> bool:
        rank = world.place.rank
        if world._step < 5 or len(world._job.sizes) > 2:
            return False
        calls[rank] += 1
        if rank == 2 and calls[rank] == 3:  # it has two passes in an attempt
            world._job.events.append(Kill(5, rank=2))
        return rank == 1 and calls[rank] <= 9  # it has three

    job, folder = play(wrong, ONE, TWO, THREE, factor=factor)
    check(job, folder)
    assert len(job.sizes) > 1
    assert any("twice" in event for event in events(folder)) == (factor == 1.5)


def of(number: int, *norms: float) -> Pass:
    return Pass(number, norms, norms)


def test_passes_are_compared_to_the_bit_or_up_to_rounding() -> None:
    one = of(0, 1.0, 2.0)
    nearly = of(0, 1.0, 2.0 + 1e-6)
    bound = rounding("fp32")

    def found(*machines: str, is_again: bool = False, other: Pass = nearly) -> int:
        first, second = machines
        of_ranks = [Passes(first, is_again, one, None), Passes(second, False, None, other)]
        return len(differences(of_ranks, bound))

    assert found("cpu", "cpu") == 1
    assert found("cpu", "another") == found("", "") == found("cpu", "cpu", is_again=True) == 0
    assert found("", "", other=of(0, 1.0, 2.1)) == found("", "", other=of(0, 1.0, torch.inf)) == 1
    assert found("cpu", "cpu", other=of(7, 9.0, 9.0)) == 0  # no rank has it


def test_gradients_that_overflow_are_no_difference() -> None:
    of_ranks = [
        Passes("", False, of(0, torch.inf), None),
        Passes("", False, None, of(0, torch.nan)),
    ]
    assert differences(of_ranks, 0.1) == []


def test_the_wrong_rank_is_in_all_differences() -> None:
    right, wrong = of(0, 1.0), of(0, 2.0)
    passes = [
        Passes("", False, right, of(1, 1.0)),
        Passes("", False, of(1, 2.0), of(2, 2.0)),  # it is wrong
        Passes("", False, of(2, 1.0), right),
    ]
    assert wrong_rank(differences(passes, 0.1), 3) == 1
    two = [Passes("", False, right, of(1, 1.0)), Passes("", False, of(1, 2.0), wrong)]
    assert wrong_rank(differences(two, 0.1), 2) is None
