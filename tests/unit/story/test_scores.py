"""Scores of evaluations: wherever a program evaluates, trackers have them once."""

import json
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from hvd_train.errors import UsageError
from hvd_train.session import Session
from hvd_train.world.world import LocalWorld, World
from tests.support.programs import DATA, Interrupted, Stop, measure, played, take
from tests.support.worlds import run_ranks

FOLDER = Path("run")
EVERYWHERE = [
    (0, "first"), (0, "head"), (2, "mid"), (4, "mid"), (5, "val"), (5, "test.1"),
    (5, "head"), (6, "mid"), (8, "mid"), (8, "val"), (8, "test.1"), (8, "end"),
]  # fmt: skip


def evaluate_everywhere(
    session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, stop: Stop
) -> None:
    done = iter(range(1, 100))

    def evaluate(name: str) -> None:
        session.evaluate(DATA, measure, name=name)
        stop(next(done))

    evaluate("first")
    for epoch in session.epochs():
        evaluate("head")
        for step in epoch:
            take(step, model)
            if step.number % 2 == 0 and step.number < 10:
                evaluate("mid")
            if step.number == 8:
                break
        evaluate("val")
        evaluate("test.1")
    evaluate("end")


def written() -> list[list[tuple[int, str]]]:
    """Return the step and the name of each evaluation in TensorBoard and in metrics.jsonl."""
    board = EventAccumulator(str(FOLDER / "tensorboard")).Reload()
    shown = [(event.step, tag) for tag in board.Tags()["scalars"] for event in board.Scalars(tag)]
    plotted = [
        (step, name.removesuffix("/loss"))
        for step, name in shown
        if name.endswith("/loss") and name != "train/loss"
    ]
    lines = map(json.loads, (FOLDER / "metrics.jsonl").read_text().splitlines())
    events = [
        (line["step"], line["message"].split()[0])
        for line in lines
        if line.get("name") == "evaluation"
    ]
    return [plotted, events]


class Gone(BaseException):
    """Ends a program without a commit."""


@pytest.mark.parametrize(
    ("ranks", "error", "stop_at"),
    [(1, Interrupted, 5), (2, Gone, 4), (2, Gone, 12)],
)
def test_scores_of_each_evaluation_are_written_once(
    ranks: int, error: type[BaseException], stop_at: int
) -> None:
    """Also if the run stops after one of them, with a commit or without, and resumes."""

    def body(world: World, stops: bool) -> None:
        def stop(number: int) -> None:
            if stops and number == stop_at:
                raise error

        def program(
            session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, _: Stop
        ) -> None:
            evaluate_everywhere(session, model, optimizer, stop)

        played(world, program, FOLDER, commit_steps=2)

    if stop_at:
        with pytest.raises(error):
            run_ranks(ranks, lambda world: body(world, stops=True))
    run_ranks(ranks, lambda world: body(world, stops=False))
    for found in written():
        assert sorted(found) == sorted(EVERYWHERE)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("val", r"two evaluations after step 0 have the name 'val': give each its own, name=..."),
        ("train", r"evaluate\(name='train'\) names scores: take another name"),
        ("a/b", r"evaluate\(name='a/b'\) names scores"),
    ],
)
def test_a_name_that_scores_cannot_have_is_one_line(name: str, says: str) -> None:
    def program(session: Session, *_: object) -> None:
        session.evaluate(DATA, measure)
        session.evaluate(DATA, measure, name=name)

    with pytest.raises(UsageError, match=says):
        played(LocalWorld(), program, FOLDER)
