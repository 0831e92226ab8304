"""What the journal writes, and what it removes when a run goes on from an earlier step."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from hvd_train.progress.figures import OF_CLASSES
from hvd_train.run_files import appended_file
from hvd_train.run_files import journal as journals
from hvd_train.run_files.journal import RunJournal, SilentJournal
from hvd_train.run_files.ledger import Entry, read
from hvd_train.run_files.records import EpochRecord, Plan, StepRecord
from tests.support.full_disk import no_room


def step_record(step: int, loss: float = 0.5) -> StepRecord:
    """Return the record of a step of the first epoch."""
    scores = {"loss": loss, "top1": 0.1, "top5": 0.2}
    return StepRecord(1, step, 10 * step, scores, 0.01, None, None, 0, 100.0, {"data": 0.25, "forward": 0.5})


def epoch_record(epoch: int, step: int) -> EpochRecord:
    """Return the record of an epoch that was evaluated."""
    training = {"loss": 0.5, "top1": 0.1, "top5": 0.2}
    return EpochRecord(epoch, step, {**training, "val_loss": 0.25, "val_top1": 0.75, "val_top5": 1.0}, 100.0)


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


def test_what_a_full_disk_does_not_take_is_written_when_it_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics, TensorBoard and the ledger lack nothing afterwards; the user is told once for each of them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr(appended_file, "_AGAIN_S", 0.0)
    journal = RunJournal(Path(), 0, 0, live=False, ledger=True)
    for step in range(1, 10):
        with no_room() if 3 <= step <= 6 else nullcontext():
            journal.took(Entry(0, (step, step), 1, (step - 1, step), step))
            journal.step(step_record(step))
            journal.event("note", f"step {step}")
    journal.close()
    assert [line["step"] for line in lines() if line["kind"] == "step"] == list(range(1, 10))
    assert [entry.steps[0] for entry in read(Path("ledger.jsonl"))] == list(range(1, 10))
    events = EventAccumulator("tensorboard").Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 10))
    shown = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("step ")]
    assert len(shown) == 3
    assert all("No space left on device; what belongs there is kept until it fits" in line for line in shown)


def test_a_run_goes_on_where_the_disk_is_full_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that did not happen are removed without room for a copy, and what comes is written later."""
    monkeypatch.setattr(appended_file, "_AGAIN_S", 0.0)
    journal = RunJournal(Path(), 0, 0, live=False, ledger=True)
    for step in (1, 2, 3):
        journal.took(Entry(0, (step, step), 1, (step - 1, step), step))
        journal.step(step_record(step))
    journal.close()
    with no_room():
        journal = RunJournal(Path(), 2, 0, live=False, ledger=True)
        journal.took(Entry(0, (3, 3), 2, (2, 3), 3))
        journal.step(step_record(3, loss=0.25))
    assert [line["step"] for line in lines()] == [1, 2]
    journal.close()
    assert [line["loss"] for line in lines()] == [0.5, 0.5, 0.25]
    assert [entry.world_size for entry in read(Path("ledger.jsonl"))] == [1, 1, 2]


def test_a_process_whose_folder_was_taken_over_writes_no_line_any_more() -> None:
    """A rank 0 that was stopped, and wakes when another one keeps the journal, leaves all files as they are."""
    held = True
    journal = RunJournal(Path(), 0, 0, live=False, ledger=True, permission=lambda: held)
    journal.took(Entry(0, (1, 1), 1, (0, 1), 1))
    journal.step(step_record(1))
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    held = False
    journal.took(Entry(0, (2, 2), 1, (1, 2), 2))
    journal.step(step_record(2))
    journal.epoch(epoch_record(1, 2))
    journal.event("note", "hello")
    journal.close()
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


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
    journal.begin(Plan(1, 10, OF_CLASSES, "images"))
    journal.step(step_record(1))
    journal.epoch(epoch_record(1, 1))
    journal.took(Entry(0, (1, 1), 1, (0, 1), 7))
    journal.event("note", "hello")
    journal.close()
    assert list(Path().iterdir()) == []


def test_the_ledger_is_kept_where_it_is_asked_for() -> None:
    """A run without --ledger has no ledger.jsonl; with it, no step is missing when the journal is closed."""
    for ledger, files in ((False, 0), (True, 1)):
        journal = RunJournal(Path(), 0, 0, live=False, ledger=ledger)
        journal.took(Entry(0, (1, 1), 2, (0, 10), 7))
        journal.took(Entry(0, (1, 2), 2, (0, 20), 8))
        journal.close()
        assert len(list(Path().glob("ledger.jsonl"))) == files
    assert json.loads(Path("ledger.jsonl").read_text())["steps"] == [1, 2]


def test_an_epoch_that_is_over_is_in_the_ledger() -> None:
    """Its last steps do not wait for the first one of the next epoch, before which the evaluation comes."""
    journal = RunJournal(Path(), 0, 0, live=False, ledger=True)
    journal.took(Entry(0, (1, 2), 2, (0, 20), 7))
    journal.epoch(epoch_record(1, 2))
    assert json.loads(Path("ledger.jsonl").read_text())["steps"] == [1, 2]
    journal.close()


@pytest.mark.parametrize(("step", "epochs_done"), [(90_000, 89), (89_990, 89), (89_000, 88)])
def test_opening_reads_the_end_of_the_records_only(
    step: int, epochs_done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 90 epochs as after one: of the 14 MB no more than what comes after the step, rounded up to 64 KB."""
    with Path("metrics.jsonl").open("w") as file:
        for number in range(1, 90_001):
            epoch = -(-number // 1000)
            file.write(json.dumps({"kind": "step", "step": number, "epoch": epoch, "loss": 0.1, "x": "y" * 80}) + "\n")
            if number % 1000 == 0:
                file.write(json.dumps({"kind": "epoch", "step": number, "epoch": epoch}) + "\n")
    parsed = []
    loads = json.loads
    with monkeypatch.context() as patch:
        patch.setattr(json, "loads", lambda line: parsed.append(line) or loads(line))
        assert journals._forget_after(Path("metrics.jsonl"), step, epochs_done) == (step, epochs_done)
    assert len(parsed) <= 90_000 - step + 5
    steps = [line["step"] for line in lines() if line["kind"] == "step"]
    assert (steps[0], steps[-1], len(steps)) == (1, step, step)


def test_messages_without_a_step_stay() -> None:
    """Also those that came after the step which the run goes on from, in the order in which they came."""
    journal = RunJournal(Path(), 0, 0, live=False)
    for number in range(1, 6):
        journal.step(step_record(number))
        journal.event("note", f"after {number}")
    journal.close()
    resumed(2, 0, 3)
    assert [line.get("message", line.get("step")) for line in lines()] == [
        *(1, "after 1", 2, "after 2", "after 3", "after 4", "after 5", 3),
    ]


def test_a_process_that_is_killed_while_it_cuts_the_records_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept is written first; what is left behind it goes when the file is opened again."""
    journal = RunJournal(Path(), 0, 0, live=False)
    for number in range(1, 6):
        journal.step(step_record(number))
        journal.event("note", f"after {number}")
    journal.close()

    class Killed(BaseException):
        pass

    def dies(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", dies)
        with pytest.raises(Killed):
            RunJournal(Path(), 2, 0, live=False)
    resumed(2, 0, 3)
    found = [line.get("message", line.get("step")) for line in lines()]
    assert found[:3] == [1, "after 1", 2]
    assert {f"after {number}" for number in range(1, 6)} <= set(found)
    assert [number for number in found if isinstance(number, int)] == [1, 2, 3]
