"""Event files as TensorBoard reads them."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hvd_train.run_files.board import Board
from hvd_train.run_files.records import Numbers


def numbers(step: int, **values: float) -> Numbers:
    """Return numbers of a step of the first epoch; `_` in a name stands for `/`."""
    return Numbers("step", step, 1, 1e9 + step, {name.replace("_", "/"): value for name, value in values.items()})


def test_numbers_are_read_back_by_their_names_and_steps() -> None:
    """With TensorBoard's own reader, while the file is still open: people watch."""
    board = Board(Path("board"), 0, [].append)
    board.add(numbers(1, train_loss=0.5, val_loss=0.25))
    board.add(numbers(2, train_loss=0.125))
    events = EventAccumulator("board").Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.5), (2, 0.125)]
    assert [event.value for event in events.Scalars("val/loss")] == [0.25]
    board.close(None)


def test_steps_after_the_one_resumed_did_not_happen() -> None:
    """TensorBoard forgets those of an earlier file, and shows each step once."""
    for resumed, values in ((0, {1: 1.0, 2: 2.0, 3: 3.0}), (1, {2: 2.5, 3: 3.5})):
        board = Board(Path("board"), resumed, [].append)
        for step, value in values.items():
            board.add(numbers(step, loss=value))
        board.close(None)
    events = EventAccumulator("board").Reload()
    assert [event.value for event in events.Scalars("loss")] == [1.0, 2.5, 3.5]
