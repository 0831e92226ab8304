"""Scores of evaluations: wherever a program evaluates, trackers have them once."""

import itertools

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from hvd_train.errors import UsageError
from hvd_train.session import Session
from hvd_train.world.world import LocalWorld
from tests.support.launching import records
from tests.support.programs import DATA, Interrupted, measure, played, take
from tests.support.worlds import run_ranks

EVERYWHERE = [
    (0, "first"), (0, "head"), (2, "mid"), (4, "mid"), (5, "val"), (5, "test.1"),
    (5, "head"), (6, "mid"), (8, "mid"), (8, "val"), (8, "test.1"), (8, "end"),
]  # fmt: skip


def written() -> list[list[tuple[int, str]]]:
    """Return the step and the name of each evaluation in TensorBoard and in metrics.jsonl."""
    board = EventAccumulator("run/tensorboard").Reload()
    plotted = [
        (event.step, tag.removesuffix("/loss"))
        for tag in board.Tags()["scalars"]
        if tag.endswith("/loss") and tag != "train/loss"
        for event in board.Scalars(tag)
    ]
    events = [
        (line["step"], line["message"].split()[0])
        for line in records("event")
        if line["name"] == "evaluation"
    ]
    return [plotted, events]


class Gone(BaseException):
    """Ends a program without a commit."""


@pytest.mark.parametrize(
    ("ranks", "error", "stop_at"), [(1, Interrupted, 5), (2, Gone, 4), (2, Gone, 12)]
)
def test_scores_of_each_evaluation_are_written_once(
    ranks: int, error: type[BaseException], stop_at: int
) -> None:
    """Also if the run stops after one of them, with a commit or without, and resumes."""

    def program(session: Session, model: nn.Module, *_: object) -> None:
        numbers = itertools.count(1)

        def evaluate(name: str) -> None:
            session.evaluate(DATA, measure, name=name)
            if stops and next(numbers) == stop_at:
                raise error

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

    stops = True
    with pytest.raises(error):
        run_ranks(ranks, lambda world: played(world, program, commit_steps=2))
    stops = False
    run_ranks(ranks, lambda world: played(world, program, commit_steps=2))
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
        played(LocalWorld(), program)
