"""The files of a journal after a run has gone on from an earlier step: nothing comes twice, and nothing is missing."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from hvd_train.elastic.members import Change, Member
from hvd_train.run_files.journal import RunJournal
from hvd_train.run_files.ledger import Entry, read
from tests.unit.run_files.test_journal import epoch_record, lines, step_record


def shown(tag: str) -> list[tuple[int, float]]:
    """Steps and values that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [(event.step, event.value) for event in EventAccumulator("tensorboard").Reload().Scalars(tag)]


def test_tensorboard_forgets_the_steps_that_did_not_happen() -> None:
    """A curve goes on from the step resumed, without a second one below it."""
    for resumed, losses in ((0, (1.0, 2.0, 3.0)), (1, (2.5, 3.5))):
        journal = RunJournal(Path(), resumed, 0, live=False)
        for step, loss in enumerate(losses, resumed + 1):
            journal.step(step_record(step, loss))
        journal.close()
    assert shown("train/loss") == [(1, 1.0), (2, 2.5), (3, 3.5)]


def test_an_epoch_that_is_over_outlives_a_power_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first step of the next epoch on only the disk has the lines of its ledger."""
    on_disk: list[str] = []

    def noted(file: int) -> None:
        if stat.S_ISREG(os.fstat(file).st_mode):
            on_disk.append(Path("ledger.jsonl").read_text())

    journal = RunJournal(Path(), 0, 0, live=False, ledger=True)
    journal.took(Entry(0, (1, 2), 2, (0, 20), 7))
    monkeypatch.setattr(os, "fsync", noted)
    journal.epoch(epoch_record(1, 2))
    assert [json.loads(text)["steps"] for text in on_disk] == [[1, 2]]
    journal.close()


def test_the_state_gives_the_ledger_what_the_last_rank_0_did_not_write() -> None:
    """A rank that takes the journal over knows the entries of the epoch, and none of them is missing or twice."""
    entries = [Entry(0, (1, 5), 2, (0, 100), 5), Entry(0, (6, 8), 2, (100, 160), 8)]
    former = RunJournal(Path(), 0, 0, live=False, ledger=True)
    former.took(entries[0])
    former.took(Entry(0, (6, 6), 2, (100, 120), 6))
    former._lines.close()  # it is killed: what is not in the files is gone
    assert [entry.steps for entry in read(Path("ledger.jsonl"))] == [(1, 5)]
    latter = RunJournal(Path(), 8, 0, live=False, ledger=True)
    for _ in range(2):
        latter.catch_up(entries, None, None)
    latter.close()
    assert list(read(Path("ledger.jsonl"))) == entries


def test_a_record_that_is_at_the_step_resumed_stays() -> None:
    """The step of the checkpoint has happened, and so has all that was said and done before it."""
    journal = RunJournal(Path(), 0, 0, live=False)
    for step in (1, 2, 3):
        journal.step(step_record(step))
        journal.event("skipped", f"step {step} is skipped", step=step)
    journal.close()
    RunJournal(Path(), 2, 0, live=False).close()
    assert [(line["kind"], line["step"]) for line in lines()] == [
        ("step", 1),
        ("event", 1),
        ("step", 2),
        ("event", 2),
    ]


def test_lines_that_are_kept_are_on_disk_before_others_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the two the process has lost nothing; after both, a power failure brings nothing back."""
    journal = RunJournal(Path(), 0, 0, live=False)
    for step in (1, 2, 3):
        journal.step(step_record(step))
        journal.event("note", f"after {step}")
    journal.close()
    path, done = Path("metrics.jsonl"), list[str]()
    ftruncate, fsync = os.ftruncate, os.fsync

    def cut(file: int, length: int) -> None:
        assert [line.get("message", line.get("step")) for line in map(json.loads, whole_lines(path, length))] == [
            *(1, "after 1", "after 2", "after 3"),
        ]
        done.append("cut")
        ftruncate(file, length)

    def forced(file: int) -> None:
        if os.path.samestat(os.fstat(file), path.stat()):
            done.append("forced")
        fsync(file)

    monkeypatch.setattr(os, "ftruncate", cut)
    monkeypatch.setattr(os, "fsync", forced)
    RunJournal(Path(), 1, 0, live=False).close()
    assert done == ["cut", "forced"]


def whole_lines(path: Path, length: int) -> list[bytes]:
    """The lines of the first bytes of a file."""
    return path.read_bytes()[:length].splitlines()


def test_a_record_is_written_once_by_whoever_takes_the_journal_over() -> None:
    """It has read which step and epoch were written last, also where the records of steps are rare."""
    journal = RunJournal(Path(), 0, 0, live=False)
    journal.step(step_record(10))
    journal.epoch(epoch_record(1, 12))
    journal.close()
    for step, epoch in ((10, 1), (20, 2)):
        journal = RunJournal(Path(), 24, 2, live=False)
        journal.catch_up([], step_record(step), epoch_record(epoch, 12 * epoch))
        journal.catch_up([], step_record(step), epoch_record(epoch, 12 * epoch))
        journal.close()
    assert [(line["kind"], line["step"]) for line in lines()] == [
        ("step", 10),
        ("epoch", 12),
        ("step", 20),
        ("epoch", 24),
    ]


def test_lines_before_a_torn_one_are_looked_at_all_the_same() -> None:
    """What did not happen goes, and what was written is known to be."""
    journal = RunJournal(Path(), 0, 0, live=False)
    for step in (1, 2, 3):
        journal.step(step_record(step))
    journal.close()
    with Path("metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    journal = RunJournal(Path(), 2, 0, live=False)
    journal.catch_up([], step_record(2), None)
    journal.close()
    assert [line["step"] for line in lines()] == [1, 2]


def test_a_change_of_world_has_its_facts() -> None:
    """Who left, who came, how long it took and what it cost, for programs; TensorBoard shows size and seconds."""
    members = [Member("h1", 1), Member("h2", 2), Member("h3", 3)]
    change = Change(tuple(members[:2]), (members[0], members[2]), "a rank was lost", 1.0, step=7, steps_lost=3)
    journal = RunJournal(Path(), 0, 0, live=False)
    journal.world(change, 8, 1.25)
    journal.close()
    (line,) = lines()
    assert (line["name"], line["step"], line["seconds"], line["steps_lost"]) == ("world", 8, 1.25, 3)
    assert (line["previous_size"], line["world_size"]) == (2, 2)
    assert (line["left"], line["came"]) == ([str(members[1])], [str(members[2])])
    assert (shown("world/size"), shown("world/seconds_to_next_step")) == ([(8, 2.0)], [(8, 1.25)])


def test_a_planted_link_is_not_cut() -> None:
    """The metrics of another run, to which it leads, stay as they are."""
    journal = RunJournal(Path(), 0, 0, live=False)
    for step in range(1, 6):
        journal.step(step_record(step, 1.0))
    journal.close()
    before = Path("metrics.jsonl").rename("outside").read_bytes()
    Path("metrics.jsonl").symlink_to("outside")
    with pytest.raises(OSError, match="it is a link, which is not followed"):
        RunJournal(Path(), 2, 0, live=False)
    assert Path("outside").read_bytes() == before
