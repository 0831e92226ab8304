"""What a run writes down, and what it forgets when it goes on from an earlier step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvd_train.run_files.journal import EpochRecord, LineDisplay, RunJournal, StepRecord, epoch_line


def step_record(step: int, loss: float = 0.5) -> StepRecord:
    """A step of the first epoch."""
    return StepRecord(1, step, 10 * step, loss, 0.1, 0.2, 0.01, None, None, 0, 100.0, {"data": 0.25, "forward": 0.5})


def epoch_record(epoch: int, step: int) -> EpochRecord:
    """An epoch with scores."""
    return EpochRecord(epoch, step, 0.5, 0.1, 0.2, 0.25, 0.75, 1.0, 100.0)


def lines() -> list[dict[str, Any]]:
    """What is in metrics.jsonl, each line strict JSON."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in Path("metrics.jsonl").read_text().splitlines()]


def life(resumed_step: int, epochs_done: int, *steps: int) -> None:
    """A run that goes on from a step and writes these."""
    journal = RunJournal(Path(), resumed_step, epochs_done, live=False)
    for step in steps:
        journal.step(step_record(step))
    journal.close()


def test_each_record_is_one_line_of_json() -> None:
    """With its kind and time; numbers that are not finite are null, which every reader knows."""
    journal = RunJournal(Path(), 0, 0, live=False)
    journal.step(step_record(1, loss=float("nan")))
    journal.step(step_record(2, loss=float("inf")))
    journal.epoch(epoch_record(1, 2))
    journal.event("note", "hello", world_size=3)
    journal.close()
    assert [line["kind"] for line in lines()] == ["step", "step", "epoch", "event"]
    assert [line.get("loss") for line in lines()] == [None, None, 0.5, None]
    assert lines()[2]["val_top1"] == 0.75
    assert lines()[3]["world_size"] == 3
    assert all(line["time"] > 1e9 for line in lines())


def test_steps_after_the_one_resumed_did_not_happen() -> None:
    """Lines beyond the checkpoint are taken out, those before it stay."""
    life(0, 0, 1, 2, 3, 4)
    life(2, 0, 3)
    assert [line["step"] for line in lines()] == [1, 2, 3]


def test_an_epoch_that_is_ended_again_is_written_once() -> None:
    """Its last step may be committed before its end is: going on from there ends it a second time."""
    journal = RunJournal(Path(), 0, 0, live=False)
    journal.step(step_record(10))
    journal.epoch(epoch_record(1, 10))
    journal.close()
    life(10, 0)
    assert [line["kind"] for line in lines()] == ["step"]


def test_an_epoch_that_is_done_stays() -> None:
    """Going on after the end of an epoch keeps its line."""
    journal = RunJournal(Path(), 0, 0, live=False)
    journal.epoch(epoch_record(1, 10))
    journal.close()
    life(10, 1)
    assert [line["kind"] for line in lines()] == ["epoch"]


def test_a_torn_last_line_is_taken_out() -> None:
    """A process killed in mid line leaves a file that can be read again, and appended to."""
    life(0, 0, 1, 2)
    with Path("metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st\xe9')
    life(2, 0, 3)
    assert [line["step"] for line in lines()] == [1, 2, 3]


def test_events_are_kept() -> None:
    """What the user was told stays told."""
    journal = RunJournal(Path(), 0, 0, live=False)
    journal.event("note", "hello")
    journal.close()
    life(0, 0)
    assert [line["message"] for line in lines()] == ["hello"]


def test_a_full_disk_ends_the_writing_and_not_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """One line says so; the console goes on."""
    Path("metrics.jsonl").symlink_to("/dev/full")
    journal = RunJournal.__new__(RunJournal)
    journal._path, journal._display = Path("metrics.jsonl"), LineDisplay()
    journal._lines = Path("metrics.jsonl").open("w", buffering=1)  # noqa: SIM115  # the journal closes it

    class Board:
        """No TensorBoard."""

        def close(self) -> None:
            """Nothing."""

    journal._board = Board()  # type: ignore[assignment]
    journal.event("note", "first")
    journal.event("note", "second")
    told = capsys.readouterr().out.splitlines()
    assert told == [
        "first",
        "cannot write metrics.jsonl: No space left on device; training goes on without it",
        "second",
    ]


def test_tensorboard_has_the_same_numbers() -> None:
    """Loss and validation scores are there under their names."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    journal = RunJournal(Path(), 0, 0, live=False)
    journal.step(step_record(1))
    journal.epoch(epoch_record(1, 1))
    journal.close()
    events = EventAccumulator("tensorboard").Reload()
    assert [event.value for event in events.Scalars("train/loss")] == [0.5]
    assert [(event.step, event.value) for event in events.Scalars("val/top1")] == [(1, 0.75)]
    assert [event.value for event in events.Scalars("seconds/forward")] == [0.5]
    assert "train/gradient_norm" not in events.Tags()["scalars"]


def test_the_line_of_an_epoch() -> None:
    """What a user reads; without an evaluation its part is missing."""
    assert epoch_line(epoch_record(3, 9), 20) == (
        "epoch  3/20  loss 0.5000  top-1  10.00%  val loss 0.2500  val top-1  75.00%       100 images/s"
    )
    plain = EpochRecord(3, 9, 0.5, 0.1, 0.2, None, None, None, 1234.0)
    assert epoch_line(plain, 5) == "epoch 3/5  loss 0.5000  top-1  10.00%     1,234 images/s"


def test_what_is_not_there_comes_from_the_state() -> None:
    """Once: what is there stays as it is, and a run that goes on in another folder does not begin with the past."""
    life(0, 0, 1, 2)
    journal = RunJournal(Path(), 3, 1, live=False)
    for _ in range(2):
        journal.catch_up([], step_record(3), epoch_record(1, 3))
    journal.catch_up([], step_record(2), None)
    journal.close()
    assert [(line["kind"], line["step"]) for line in lines()] == [("step", 1), ("step", 2), ("step", 3), ("epoch", 3)]
    Path("metrics.jsonl").unlink()
    elsewhere = RunJournal(Path(), 3, 1, live=False)
    elsewhere.catch_up([], step_record(3), epoch_record(1, 3))
    elsewhere.close()
    assert lines() == []
