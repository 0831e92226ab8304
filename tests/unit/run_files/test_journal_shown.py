"""What the user sees of what the journal takes: on the console, and in TensorBoard under which name."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from hvd_train.elastic.members import Change, Member
from hvd_train.progress.figures import OF_CLASSES
from hvd_train.run_files import display
from hvd_train.run_files.display import epoch_line
from hvd_train.run_files.journal import RunJournal
from hvd_train.run_files.ledger import Entry
from hvd_train.run_files.records import Moment, Plan, StepRecord
from tests.unit.run_files.test_journal import epoch_record, lines, step_record
from tests.unit.run_files.test_journal_resumed import shown

CHANGE = Change((Member("h1", 1), Member("h2", 2)), (Member("h1", 1),), "a rank was lost", 1.0, step=7, steps_lost=3)


def test_progress_epochs_and_messages_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With how many epochs and samples there are, by which the time left is known."""
    monkeypatch.setattr(display, "_LINE_SECONDS", 0.0)
    journal = RunJournal(Path(), 0, 0, live=False)
    journal.begin(Plan(5, 1000, OF_CLASSES[:2], "images"))
    journal.progress(Moment(1, 500, 15, lambda: {"loss": 0.5, "top1": 0.25}, images_per_second=10.0))
    journal.epoch(epoch_record(2, 20))
    journal.event("note", "hello")
    journal.world(CHANGE, 8, 1.25)
    journal.close()
    assert capsys.readouterr().out.splitlines() == [
        "epoch 2/5  step 15  50%  loss 0.5000  top-1 25.00%  10 images/s  5:50 left",
        f"{epoch_line(epoch_record(2, 20), Plan(5, 1000, OF_CLASSES[:2]))}  0:30 left",
        "hello",
        *CHANGE.describe(1.25).splitlines(),
    ]


def test_a_bar_is_drawn_where_one_is_asked_for_and_gone_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    """The cursor is shown again: whoever types next sees what they type."""
    journal = RunJournal(Path(), 0, 0, live=True)
    journal.begin(Plan(5, 1000, OF_CLASSES[:2], "images"))
    journal.close()
    output = capsys.readouterr().out
    assert output.rfind("\x1b[?25h") > output.find("\x1b[?25l") >= 0


def test_a_change_of_world_says_why() -> None:
    """For programs, too, and in which second; the message is that of the console."""
    journal = RunJournal(Path(), 0, 0, live=False)
    journal.world(CHANGE, 8, 1.23456)
    journal.close()
    (line,) = lines()
    assert (line["why"], line["seconds"], line["world_size"], line["previous_size"]) == ("a rank was lost", 1.235, 1, 2)
    assert line["message"] == CHANGE.describe(1.23456)


def test_a_line_has_its_time_to_the_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a few milliseconds can be told apart, and no line is longer than it need be."""
    journal = RunJournal(Path(), 0, 0, live=False)
    monkeypatch.setattr("time.time", lambda: 1_700_000_000.123456)
    journal.event("note", "hello")
    journal.close()
    assert lines()[0]["time"] == 1_700_000_000.123


def test_curves_have_their_names() -> None:
    """All numbers of a step but its number, and the three scores of an epoch."""
    journal = RunJournal(Path(), 0, 0, live=False)
    scores = {"loss": 0.5, "top1": 0.25, "top5": 0.75}
    journal.step(StepRecord(1, 4, 40, scores, 0.125, 2.0, 1024.0, 3, 100.0, None))
    journal.epoch(epoch_record(1, 4))
    journal.close()
    values = {"loss": 0.5, "top1": 0.25, "top5": 0.75, "learning_rate": 0.125, "gradient_norm": 2.0}
    values |= {"loss_scale": 1024.0, "skipped_steps": 3.0, "images_per_second": 100.0}
    assert {name: shown(f"train/{name}") for name in values} == {name: [(4, v)] for name, v in values.items()}
    evaluated = {"loss": 0.25, "top1": 0.75, "top5": 1.0}
    assert {name: shown(f"val/{name}") for name in evaluated} == {name: [(4, v)] for name, v in evaluated.items()}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tags = EventAccumulator("tensorboard").Reload().Tags()["scalars"]
    assert sorted(tags) == sorted([f"train/{name}" for name in values] + [f"val/{name}" for name in evaluated])


def test_an_epoch_that_was_not_evaluated_has_no_scores() -> None:
    """Neither a curve nor a number in their place."""
    journal = RunJournal(Path(), 0, 0, live=False)
    record = epoch_record(1, 4)
    scores = {**record.scores, "val_loss": None, "val_top1": None, "val_top5": math.nan}
    journal.epoch(replace(record, scores=scores))
    journal.close()
    (line,) = lines()
    assert [line[name] for name in ("val_loss", "val_top1", "val_top5")] == [None, None, None]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert EventAccumulator("tensorboard").Reload().Tags()["scalars"] == ["val/top5"]


@pytest.mark.parametrize(("given", "steps"), [(2, [1, 2]), (0, [])])
def test_a_record_that_is_no_news_is_not_written_again(given: int, steps: list[int]) -> None:
    """The state has the last step and the last epoch, and what was written before was written once."""
    journal = RunJournal(Path(), 0, 0, live=False)
    for step in range(1, given + 1):
        journal.step(step_record(step))
    for step in (given, given - 1):
        journal.catch_up([], step_record(step) if step > 0 else None, None)
    journal.close()
    assert [line["step"] for line in lines()] == steps


def test_a_journal_without_a_ledger_takes_what_a_state_has() -> None:
    """The state always has the entries of its epoch; without --ledger they go nowhere."""
    journal = RunJournal(Path(), 8, 0, live=False)
    journal.catch_up([Entry(0, (1, 8), 2, (0, 160), 8)], None, None)
    journal.close()
    assert not Path("ledger.jsonl").exists()


def test_records_of_an_evaluation_alone_are_found_again() -> None:
    """An epoch that the file has is not written twice, whether a step of the next one stands after it or not."""
    for after in ([], [11]):
        Path("metrics.jsonl").unlink(missing_ok=True)
        journal = RunJournal(Path(), 0, 0, live=False)
        journal.step(step_record(10))
        journal.epoch(epoch_record(1, 10))
        for step in after:
            journal.step(replace(step_record(step), epoch=2))
        journal.close()
        journal = RunJournal(Path(), 11, 1, live=False)
        journal.catch_up([], None, epoch_record(1, 10))
        journal.close()
        assert [line["kind"] for line in lines()].count("epoch") == 1
