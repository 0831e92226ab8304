"""What a state holds for the files of its run, so that nothing is missing there with the rank that was to write it."""

from __future__ import annotations

import torch

from hvd_train.progress.fingerprint import added
from hvd_train.progress.order import Cut
from hvd_train.run_files.ledger import Entry
from hvd_train.run_files.records import EpochRecord, StepRecord
from hvd_train.state import Progress, TrainState

SCORES = {"loss": 0.5, "top1": 0.1}


def state() -> TrainState:
    """A state before its first step."""
    model = torch.nn.Linear(2, 2)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return TrainState(model, torch.optim.SGD(model.parameters()), scaler, Cut(10, 10))


def entry(epoch: int, step: int, start: int) -> Entry:
    """The entry of a step of ten samples."""
    return Entry(epoch, (step, step), 2, (start, start + 10), fingerprint=step)


def test_a_step_joins_the_line_of_the_ledger_that_those_before_it_began() -> None:
    """The journal is given the line as it is now: with the new step alone it would lose the others."""
    mine = state()
    assert mine.took(entry(0, 1, 0), 10_000) == entry(0, 1, 0)
    joined = Entry(0, (1, 2), 2, (0, 20), fingerprint=added([1, 2]))
    assert mine.took(entry(0, 2, 10), 10_000) == joined
    assert mine.took(entry(0, 11, 100), 10_000) == entry(0, 11, 100)
    assert mine.recent == [joined, entry(0, 11, 100)]
    mine.took(entry(1, 12, 0), 10_000)
    assert mine.recent == [entry(1, 12, 0)], "lines of the epoch before are on disk"


def test_what_is_not_on_disk_yet_comes_with_the_state() -> None:
    """A newcomer or a resumed run that keeps the journal from now on can write it."""
    mine, other = state(), state()
    mine.took(entry(3, 7, 60), 100)
    mine.last_step = StepRecord(4, 7, 370, SCORES, 0.01, None, 64.0, 1, 100.0, {"data": 0.25})
    mine.last_epoch = EpochRecord(3, 6, {**SCORES, "val_loss": None, "val_top1": None}, 100.0)
    mine.progress = Progress(3, 70, 7, 1, 0)
    other.load(mine.snapshot())
    assert (other.recent, other.last_step, other.last_epoch) == (mine.recent, mine.last_step, mine.last_epoch)
    assert other.progress == mine.progress


def test_a_state_of_version_0_1_0_is_taken_over() -> None:
    """Its entries list samples and are on disk already; records and odd buffers it did not have."""
    mine, old = state(), state().snapshot()
    old["recent"] = [{"epoch": 0, "step": 1, "world_size": 1, "samples": (1, 2)}]
    for name in ("last_step", "last_epoch", "buffers"):
        del old[name]
    mine.load(old)
    assert (mine.recent, mine.last_step, mine.last_epoch) == ([], None, None)
