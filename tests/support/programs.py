"""Programs with a loop of their own, which must give the same on any number of
ranks and after any fault.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hvd_train.config import DataConfig
from hvd_train.errors import UsageError
from hvd_train.loops import Update
from hvd_train.session import Session
from hvd_train.state import to_host, values_of
from hvd_train.tasks.task import Measure
from hvd_train.world.world import LocalWorld, World
from tests.support import runs
from tests.support.elastic import ONE, TOLERANCE, TWO, Kill, run_elastic
from tests.support.runs import RUN, Weights, largest_difference, small_config
from tests.support.worlds import own_generator, run_ranks

NUMBERS = itertools.count()
INPUTS = torch.cos(torch.arange(320.0)).view(40, 8)
DATA = TensorDataset(INPUTS, torch.arange(40) % 3)
STEPS = 10
STOP_AT = (2, 7)
Outcome = tuple[Weights, dict[str, Any], list[dict[str, Any]]]
Stop = Callable[..., None]
"""A program calls it after a step, with its number, and may name another place of its code."""
Program = Callable[[Session, Any, Any, Stop], None]


class Interrupted(UsageError):
    """Ends a program, which commits."""


def linear() -> nn.Module:
    return own_generator(nn.Linear(8, 3))


def momentum(model: Any) -> Any:
    """Return an optimizer, or one for each of several models."""
    if isinstance(model, dict):
        return {name: momentum(each) for name, each in model.items()}
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def network() -> nn.Module:
    """Return a network for `digits`."""
    return own_generator(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10))
    )


def digits(count: int, part: str, dtype: torch.dtype = torch.float32) -> TensorDataset:
    source = getattr(runs.few_digits(DataConfig()), part)
    return TensorDataset(source.images[:count].to(dtype) / 255, source.labels[:count])


def played(
    world: World,
    program: Program,
    folder: Path = RUN,
    make: Callable[[], Any] = linear,
    optimizer_of: Callable[[Any], Any] = momentum,
    data: Any = DATA,
    order: Any = None,
    weights: Any = None,
    lengths: Any = None,
    stop_at: int = 0,
    stop_in: str = "after a step",
    name: str = "",
    **changes: Any,
) -> Outcome:
    """Return weights, registered values and settings after a program of 10 steps;
    interrupt it after one of them.
    """

    def stop(step: int, place: str = "after a step") -> None:
        if stop_at and step >= stop_at and place == stop_in:
            raise Interrupted

    model = make()
    optimizer = optimizer_of(model)
    settings = {
        "epochs": 2,
        "global_batch_size": 8,
        "batch_size": 4,
        "warmup_epochs": 0.0,
        "learning_rate": 0.1,
    }
    config = small_config(output_dir=folder, **{**settings, **changes})
    with Session(
        model,
        optimizer,
        data,
        order=order,
        weights=weights,
        lengths=lengths,
        config=config,
        name=name,
        world=world,
    ) as session:
        program(session, model, optimizer, stop)
    state = session._ranks.state
    weights = to_host(session._ranks.parts.model.state_dict())
    return weights, values_of(session._loops.own), state.settings()


def check_same(found: Outcome, expected: Outcome, allowed: float = 0.0) -> None:
    assert largest_difference(found[0], expected[0]) <= allowed
    check_alike(found[1:], expected[1:], allowed)


def check_alike(found: Any, expected: Any, allowed: float) -> None:
    """Assert that plain values are equal; numbers may differ by this much."""
    assert type(found) is type(expected)
    if isinstance(found, dict):
        assert found.keys() == expected.keys()
        check_alike([*found.values()], [expected[key] for key in found], allowed)
    elif isinstance(found, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            check_alike(one, other, allowed)
    elif isinstance(found, Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=allowed)
    else:
        assert found == (
            pytest.approx(expected, rel=0, abs=allowed) if isinstance(found, float) else expected
        )


def with_a_newcomer(body: Callable[[World], Outcome]) -> list[Outcome]:
    """Return what a job gives on two ranks, one of which came after step
    4, since another was lost.
    """
    job = run_elastic(body, dict([ONE, TWO]), [Kill(4, rank=1)], first=2, fewest=2)
    assert len(job.results) == 2
    return job.results


def check_survives(program: Program, **given: Any) -> Outcome:
    """Assert that a program gives the same on one and three ranks, of which one has no
    micro-batch, and if a newcomer continues it on two; return that.

    A run that is interrupted twice equals the whole one to the bit.
    """
    name = f"program-{next(NUMBERS)}"

    def on(world: World, folder: str, stop_at: int = 0) -> Outcome:
        return played(world, program, Path(f"{name}-{folder}"), **given, stop_at=stop_at)

    expected = on(LocalWorld(), "whole")
    for step in STOP_AT:
        with pytest.raises(Interrupted):
            on(LocalWorld(), "resumed", step)
    check_same(on(LocalWorld(), "resumed"), expected)
    for found in (
        *run_ranks(3, lambda world: on(world, "three")),
        *with_a_newcomer(lambda world: on(world, "elastic")),
    ):
        check_same(found, expected, TOLERANCE)
    return expected


def take(step: Update, model: nn.Module) -> None:
    """Do a step, or an update of it, as plain training does."""
    for micro in step:
        micro.backward(losses(model, micro.batch))


def plain(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, stop: Stop) -> None:
    for step in session.steps():
        take(step, model)
        stop(step.number)


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of each sample."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets, reduction="none")


def measure(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Measure]:
    inputs, targets = batch
    logits = model(inputs)
    return {
        "loss": F.cross_entropy(logits, targets, reduction="none"),
        "right": logits.argmax(1) == targets,
    }
