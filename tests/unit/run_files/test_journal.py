"""The journal: what it writes and shows, and what it removes when a run resumes."""

import json
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hvd_train.membership import Change, Member
from hvd_train.run_files.journal import EpochRecord, Journal, StepRecord
from hvd_train.run_files.ledger import Entry, read
from hvd_train.run_files.run_folder import RunFolder
from tests.support.faults import no_room


def step_record(step: int, loss: float = 0.5) -> StepRecord:
    return StepRecord(
        1,
        step,
        10 * step,
        {"loss": loss},
        0.01,
        None,
        None,
        0,
        100.0,
        {"data": 0.25, "forward": 0.5},
    )


def epoch_record(epoch: int, step: int) -> EpochRecord:
    scores = {"loss": 0.25, "top1": 0.75, "top5": 1.0}
    return EpochRecord(epoch, step, {"loss": 0.5, "top1": 0.1}, scores, 100.0, 2.5)


def lines() -> list[dict[str, Any]]:
    text = Path("metrics.jsonl").read_text()
    # NaN and Infinity are not JSON
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def written() -> list[Any]:
    return [line.get("message", line.get("step")) for line in lines()]


def shown(tag: str) -> list[tuple[int, float]]:
    return [
        (event.step, event.value) for event in EventAccumulator("tensorboard").Reload().Scalars(tag)
    ]


def journal(resumed_step: int = 0, *, ledger: bool = False) -> closing[Journal]:
    return closing(Journal(RunFolder(Path()), resumed_step, ledger=ledger))


def test_each_record_is_one_line_of_json() -> None:
    with journal() as opened:
        opened.step(step_record(1, loss=float("nan")))
        opened.step(step_record(2, loss=float("inf")))
        opened.epoch(epoch_record(1, 2))
        opened.epoch(replace(epoch_record(2, 3), scores=None))
        opened.event("note", "hello", world_size=3)
    assert [line["kind"] for line in lines()] == ["step", "step", "epoch", "epoch", "event"]
    assert [line.get("loss") for line in lines()] == [None, None, 0.5, 0.5, None]
    assert [line.get("val_top1") for line in lines()[2:4]] == [0.75, None]
    assert lines()[4]["world_size"] == 3
    assert all(line["time"] > 1e9 for line in lines())


def test_tensorboard_shows_the_numbers_under_their_names() -> None:
    record = StepRecord(
        epoch=1,
        step=4,
        samples=40,
        measures={"loss": 0.5, "top1": 0.25, "top5": 0.75},
        learning_rate=0.125,
        gradient_norm=None,
        loss_scale=1024.0,
        skipped_steps=3,
        samples_per_second=100.0,
        split={"forward": 0.5},
        gpu={"power_w": 400.0},
    )
    with journal() as opened:
        opened.step(record)
        opened.evaluation("val", {"loss": 0.25}, 4)
        opened.epoch(epoch_record(1, 4))
    values = {
        "train/loss": 0.5,
        "train/top1": 0.25,
        "train/top5": 0.75,
        "train/learning_rate": 0.125,
        "train/loss_scale": 1024.0,
        "train/skipped_steps": 3.0,
        "train/samples_per_second": 100.0,
        "val/loss": 0.25,
        "seconds/forward": 0.5,
        "seconds/epoch": 2.5,
        "gpu/power_w": 400.0,
    }
    tags = EventAccumulator("tensorboard").Reload().Tags()["scalars"]
    assert {tag: shown(tag) for tag in tags} == {
        name: [(4, value)] for name, value in values.items()
    }


def test_a_change_of_world_says_who_when_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    stays, leaves, comes = (Member(host, 1) for host in ("h1", "h2", "h3"))
    change = Change((stays, leaves), (stays, comes), "a rank was lost", step=7, steps_lost=3)
    with journal() as opened:
        opened.world(change.describe(1.25), change.facts(8, 1.25))
    (line,) = lines()
    expected = {
        "name": "world",
        "step": 8,
        "seconds": 1.25,
        "steps_lost": 3,
        "why": "a rank was lost",
        "previous_size": 2,
        "world_size": 2,
        "left": [str(leaves)],
        "came": [str(comes)],
    }
    assert {**line, **expected} == line
    assert capsys.readouterr().out == f"{change.describe(1.25)}\n"
    assert shown("world/size") == [(8, 2.0)]
    assert shown("world/seconds_to_next_step") == [(8, 1.25)]


def test_steps_after_the_one_resumed_did_not_happen() -> None:
    with journal() as opened:
        for step in (1, 2, 3, 4):
            opened.step(step_record(step))
            opened.event("note", f"after {step}")
    with journal(4) as opened:
        for step in (2, 4):
            opened.event("skipped", f"skipped {step}", step=step)
    with journal(2) as opened:
        opened.step(step_record(3, loss=3.5))
    assert written() == [1, "after 1", 2, "after 2", "after 3", "after 4", "skipped 2", 3]
    assert shown("train/loss") == [(1, 0.5), (2, 0.5), (3, 3.5)]


def test_a_torn_last_line_is_taken_out() -> None:
    with journal() as opened:
        for step in (1, 2, 3):
            opened.step(step_record(step))
    with Path("metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st\xe9')
    with journal(2) as opened:
        opened.catch_up([], step_record(2), None)
        opened.step(step_record(3))
    assert written() == [1, 2, 3]


def test_a_full_disk_costs_lines_of_metrics_but_none_of_the_ledger(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with journal(ledger=True) as opened:
        for step in range(1, 10):
            with no_room() if 3 <= step <= 6 else nullcontext():
                opened.took(Entry(0, (step, step), 1, (step - 1, step), step))
                opened.step(step_record(step))
                opened.event("note", f"step {step}")
    assert [line["step"] for line in lines() if line["kind"] == "step"] == [1, 2, 7, 8, 9]
    assert [entry.steps[0] for entry in read(Path("ledger.jsonl"))] == list(range(1, 10))
    said = capsys.readouterr().out
    for name in ("metrics.jsonl", "ledger.jsonl"):
        assert said.count(f"cannot write {name}: No space left on device; training continues") == 1


def test_a_ledger_that_lacks_its_end_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with no_room(), journal(ledger=True) as opened:
        opened.took(Entry(0, (1, 5), 1, (0, 5), 7))
    assert "ledger.jsonl ends before step 1: the disk is full" in capsys.readouterr().out


MEASURES = {"loss": 0.5, "top1": 0.25, "top5": 0.5}
SO_FAR = EpochRecord(2, 15, MEASURES, None, 10.0)
PLAIN = EpochRecord(5, 50, {"loss": 0.5, "top1": 0.1}, None, 1234.0, 125.0)


def test_progress_shows_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("time.strftime", lambda form: "12:34:56")
    with journal() as opened:
        opened.begin(5, 1000, "image", "top1")
        opened.progress(SO_FAR, 500)
        opened.epoch(epoch_record(2, 20))
        opened.epoch(PLAIN)
        opened.begin(5, 1000, "image", "top1", 60.0)  # the time limit comes first
        opened.epoch(replace(epoch_record(2, 20), total_seconds=50.0))
    assert capsys.readouterr().out.splitlines() == [
        "12:34:56  epoch 2/5  step 15  50%  loss 0.5000  top-1  25.00%  10 images/s  5:50 left",
        (
            "epoch 2/5  loss 0.5000  top-1  10.00%  val loss 0.2500  val top-1  75.00%      100 "
            "images/s  2.5 s, 30 s left"
        ),
        "epoch 5/5  loss 0.5000  top-1  10.00%    1,234 images/s  2:05, 0 s left",
        (
            "epoch 2/5  loss 0.5000  top-1  10.00%  val loss 0.2500  val top-1  75.00%      100 "
            "images/s  2.5 s, 10 s left"
        ),
    ]
