"""What the journal writes, and what it removes when a run goes on from an earlier step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvd_train.run_files.display import LineDisplay
from hvd_train.run_files.journal import RunJournal, SilentJournal
from hvd_train.run_files.ledger import Entry
from hvd_train.run_files.records import EpochRecord, StepRecord


def step_record(step: int, loss: float = 0.5) -> StepRecord:
    """Return the record of a step of the first epoch."""
    return StepRecord(1, step, 10 * step, loss, 0.1, 0.2, 0.01, None, None, 0, 100.0, {"data": 0.25, "forward": 0.5})


def epoch_record(epoch: int, step: int) -> EpochRecord:
    """Return the record of an epoch that was evaluated."""
    return EpochRecord(epoch, step, 0.5, 0.1, 0.2, 0.25, 0.75, 1.0, 100.0)


def lines() -> list[dict[str, Any]]:
    """Return the records in metrics.jsonl; each line must be strict JSON."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in Path("metrics.jsonl").read_text().splitlines()]


def resumed(resumed_step: int, epochs_done: int, *steps: int) -> None:
    """Write these steps as a run that goes on after step `resumed_step`."""
    journal = RunJournal(Path(), resumed_step, epochs_done, live=False)
    for step in steps:
        journal.step(step_record(step))
    journal.close()


def test_each_record_is_one_line_of_json() -> None:
    """A line has its kind and time; a number that is not finite is null, which every reader of JSON knows."""
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
    resumed(0, 0, 1, 2, 3, 4)
    resumed(2, 0, 3)
    assert [line["step"] for line in lines()] == [1, 2, 3]


def test_an_epoch_that_is_ended_again_is_written_once() -> None:
    """The last step of an epoch may be committed before its end is: a run that goes on there ends the epoch again."""
    journal = RunJournal(Path(), 0, 0, live=False)
    journal.step(step_record(10))
    journal.epoch(epoch_record(1, 10))
    journal.close()
    resumed(10, 0)
    assert [line["kind"] for line in lines()] == ["step"]


def test_an_epoch_that_is_done_stays() -> None:
    """A run that goes on after the end of an epoch keeps the record of that epoch."""
    journal = RunJournal(Path(), 0, 0, live=False)
    journal.epoch(epoch_record(1, 10))
    journal.close()
    resumed(10, 1)
    assert [line["kind"] for line in lines()] == ["epoch"]


def test_a_torn_last_line_is_taken_out() -> None:
    """A process that was killed in mid-line leaves a file that can be read and appended to again."""
    resumed(0, 0, 1, 2)
    with Path("metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st\xe9')
    resumed(2, 0, 3)
    assert [line["step"] for line in lines()] == [1, 2, 3]


def test_events_are_kept() -> None:
    """A message to the user is kept when the run starts anew in its folder."""
    journal = RunJournal(Path(), 0, 0, live=False)
    journal.event("note", "hello")
    journal.close()
    resumed(0, 0)
    assert [line["message"] for line in lines()] == ["hello"]


def test_a_full_disk_ends_the_writing_and_not_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """One line reports the full disk, and the console goes on."""
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
    lines_shown = capsys.readouterr().out.splitlines()
    assert lines_shown == [
        "first",
        "cannot write metrics.jsonl: No space left on device; training goes on without it",
        "second",
    ]


def test_tensorboard_has_the_same_numbers() -> None:
    """TensorBoard shows loss and validation scores under their names."""
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


def test_what_the_files_lack_comes_from_the_state() -> None:
    """Records are written once, and a run that goes on in another folder does not begin with those of the first one."""
    resumed(0, 0, 1, 2)
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


def test_only_ranks_that_write_leave_files() -> None:
    """The journal of all other ranks takes everything and leaves the folder empty."""
    journal = SilentJournal()
    journal.begin(1, 10)
    journal.step(step_record(1))
    journal.epoch(epoch_record(1, 1))
    journal.took(Entry(0, 1, 1, (0,)))
    journal.event("note", "hello")
    journal.close()
    assert list(Path().iterdir()) == []


def test_the_ledger_is_kept_where_it_is_asked_for() -> None:
    """A run without --ledger has no ledger.jsonl; with it, each step has a line."""
    for ledger, files in ((False, 0), (True, 1)):
        journal = RunJournal(Path(), 0, 0, live=False, ledger=ledger)
        journal.took(Entry(0, 1, 2, (3, 1)))
        journal.close()
        assert len(list(Path().glob("ledger.jsonl"))) == files
    assert json.loads(Path("ledger.jsonl").read_text())["samples"] == [3, 1]
