"""Ranks compute micro-batches of one another again, so that a wrong machine is found."""

import functools
import itertools
import re
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
    run_elastic,
    undisturbed,
)
from tests.support.launching import json_lines
from tests.support.runs import largest_difference, small_config, trained

PLAIN = functools.cache(undisturbed)


def play(wrong: Any, *hosts: tuple[str, int], **settings: Any) -> tuple[Job, Path]:
    """Train 20 steps, with a comparison in each fifth; `wrong(world, call)` says whether the
    gradient of this call of a hook, counted in each worker, is wrong.
    """
    folder = Path(f"run-{next(NUMBERS)}")
    config = small_config(
        epochs=2, ledger=True, output_dir=folder, recheck_steps=5, commit_steps=2, **settings
    )

    def body(world: ElasticThreadWorld) -> Any:
        calls = itertools.count()

        def spoil(gradient: Tensor) -> Tensor:
            return gradient * 1.5 if wrong(world, next(calls)) else gradient

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
    assert len([*folder.glob("checkpoints/*.distrusted")]) == 2  # of steps 6 and 8


def test_two_ranks_resume_once_if_one_computes_wrongly() -> None:
    """Neither knows which of them it is; the second time the job ends."""
    job, _ = play(lambda world, _: world.place.rank == 1 and world._step >= 8, ONE, TWO)
    assert job.finish is not None
    assert job.finish.exit_code == 4


def of(number: int, *norms: float) -> Pass:
    return Pass(number, norms, norms)


def test_passes_are_compared_to_the_bit_or_up_to_rounding() -> None:
    one = of(0, 1.0, 2.0)
    nearly = of(0, 1.0, 2.0 + 1e-6)
    bound = rounding("fp32")

    def found(*machines: str, to_the_bit: bool = True, other: Pass = nearly) -> int:
        own, again = machines
        of_ranks = [Passes(own, one, None), Passes(again, None, other)]
        return len(differences(of_ranks, bound, to_the_bit=to_the_bit))

    assert found("cpu", "cpu") == 1
    assert found("cpu", "another") == found("", "") == found("cpu", "cpu", to_the_bit=False) == 0
    assert found("", "", other=of(0, 1.0, 2.1)) == found("", "", other=of(0, 1.0, torch.inf)) == 1
    assert found("cpu", "cpu", other=of(7, 9.0, 9.0)) == 0  # no rank has it


def test_gradients_that_overflow_are_no_difference() -> None:
    of_ranks = [Passes("", of(0, torch.inf), None), Passes("", None, of(0, torch.nan))]
    assert differences(of_ranks, 0.1, to_the_bit=True) == []


def test_the_wrong_rank_is_in_all_differences() -> None:
    right, wrong = of(0, 1.0), of(0, 2.0)
    passes = [
        Passes("cpu", right, of(1, 1.0)),
        Passes("cpu", of(1, 2.0), of(2, 2.0)),  # it is wrong
        Passes("cpu", of(2, 1.0), right),
    ]
    assert wrong_rank(differences(passes, 0.1, to_the_bit=False), 3) == 1
    two = [Passes("cpu", right, of(1, 1.0)), Passes("cpu", of(1, 2.0), wrong)]
    assert wrong_rank(differences(two, 0.1, to_the_bit=False), 2) is None
