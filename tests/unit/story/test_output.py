"""The run folder on rank 0: which process has it, what is written into it, and what a full disk costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvd_train import checkpoint
from hvd_train.config import Config
from hvd_train.errors import UsageError
from hvd_train.launch import launcher
from hvd_train.output import Output
from hvd_train.progress.metrics import Totals
from hvd_train.progress.order import BatchLayout
from hvd_train.run_files import run_folder
from hvd_train.run_files.ledger import Entry, read
from hvd_train.run_files.records import StepRecord
from hvd_train.run_files.run_folder import RunFolder
from hvd_train.state import TrainState
from hvd_train.world.world import Place
from tests.support.runs import small_config
from tests.unit.story.test_checkpoint import RUN, steps_on_disk

STEP = StepRecord(1, 1, 20, 0.5, 0.1, 0.2, 0.01, None, None, 0, 100.0, None)
BUSY = "another process is training in run"


def first_layout() -> BatchLayout:
    return BatchLayout(20, 4)


def opened(config: Config, state: TrainState) -> Output:
    output = Output(config)
    output.open(output.claim(state, None, first_layout, from_disk=True), state, Place())
    return output


def told(name: str) -> list[str]:
    lines: list[dict[str, Any]] = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
    return [line["message"] for line in lines if line["kind"] == "event" and line["name"] == name]


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


class Clock:
    """The time for a process that waits: each sleep takes ten seconds, and something may happen meanwhile."""

    def __init__(self) -> None:
        self.now, self.sleeps = 1000.0, 0
        self.meanwhile: Callable[[], None] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.now += 10.0
        self.sleeps += 1
        self.meanwhile()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("hvd_train.output.time.monotonic", lambda: clock.now)
    monkeypatch.setattr("hvd_train.output.time.sleep", clock.sleep)
    return clock


@pytest.fixture
def elastic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launcher.OWNER, "job")
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")


def test_a_rank_that_is_not_the_first_writes_nothing(state: TrainState) -> None:
    output = Output(small_config())
    output.open(None, state, Place(rank=1, size=2))
    output.journal.event("note", "unheard")
    output.store.save_weights(checkpoint.BEST, state)
    assert output.write_summary({"top1": 1.0}), "it has nothing to lose"
    assert (output.path, output.store.commit(state), output.commit_last(state)) == (None, True, False)
    output.close()
    assert not RUN.exists()


def test_a_second_command_is_refused_at_once(clock: Clock, state: TrainState) -> None:
    living = opened(small_config(), state)
    with pytest.raises(UsageError, match=BUSY):
        Output(small_config()).claim(state, None, first_layout, from_disk=True)
    assert clock.sleeps == 0
    assert living.commit_last(state)
    living.close()
    opened(small_config(), state).close()


@pytest.mark.usefixtures("elastic")
def test_an_elastic_job_waits_for_the_end_of_another_process(
    clock: Clock, state: TrainState, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says so once, continues as soon as the folder is free, and never takes the folder of another job."""
    living = opened(small_config(), state)
    monkeypatch.setenv(launcher.OWNER, "another job")
    with pytest.raises(UsageError, match=BUSY):
        Output(small_config()).claim(state, None, first_layout, from_disk=True)
    assert clock.sleeps == 5
    assert living.commit_last(state)
    assert capsys.readouterr().err == f"hvd-train: {BUSY}: waiting 45 s at most for its end\n"
    clock.meanwhile = living.close
    claim = Output(small_config()).claim(state, None, first_layout, from_disk=True)
    assert (claim.folder.earlier, clock.sleeps) == (True, 6)
    claim.folder.release()


@pytest.mark.usefixtures("elastic", "clock")
def test_a_job_takes_its_own_folder_over(state: TrainState, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --output-dir too, when the wait for its former workers is over; another job starts a run of its own."""
    config = small_config(output_dir=None, recipe="few")
    former = opened(config, state)
    assert former.commit_last(state)
    claim = Output(config).claim(state, None, first_layout, from_disk=True)
    assert (claim.folder.path, claim.loaded) == (former.path, True)
    assert not former.commit_last(state)
    monkeypatch.setenv(launcher.OWNER, "another job")
    others = Output(config).claim(state, None, first_layout, from_disk=True)
    assert others.folder.path != former.path
    assert not others.folder.earlier
    former.close()


@pytest.mark.usefixtures("elastic")
def test_a_new_rank_0_goes_on_in_the_folder_of_the_job(clock: Clock, state: TrainState) -> None:
    """At once, though the lock is still held; later workers of the job find the folder, whatever --resume says."""
    config = small_config(output_dir=None, recipe="few", resume="never", ledger=True)
    former, latter = opened(config, state), Output(config)
    folder = former.path
    claim = latter.claim(state, folder, first_layout, from_disk=False)
    assert (claim.folder.path, claim.folder.earlier, claim.folder.held(), clock.sleeps) == (folder, True, True, 0)
    assert not former.commit_last(state)
    latter.open(claim, state, Place())
    assert latter.commit_last(state)
    former.close()
    latter.close()
    again = Output(config).claim(state, None, first_layout, from_disk=True)
    assert (again.folder.path, again.loaded) == (folder, True)
    assert [path.name for path in Path("runs").iterdir()] == [folder.name]
    again.folder.release()


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_batch_that_does_not_fit_leaves_all_as_it_was(state: TrainState, resume: str) -> None:

    def refused() -> BatchLayout:
        raise UsageError("too large")

    for earlier in ([], [RUN]):
        if earlier:
            opened(small_config(), state).close()
        where = small_config(resume="never") if earlier else small_config(resume=resume)
        with pytest.raises(UsageError, match="too large"):
            Output(where).claim(state, None, refused, from_disk=True)
        assert list(Path().iterdir()) == earlier


def test_a_run_goes_on_from_its_newest_whole_checkpoint(state: TrainState) -> None:
    """Unless another rank has a newer state; a damaged file and a run that was moved aside are named."""
    config = small_config(keep_checkpoints=2, label_smoothing=0.25)
    output = opened(config, state)
    for _ in range(3):
        assert output.store.commit_last(state).result()
        state.count_step(Totals(1.0, 2.0, 3.0, 20), skipped=False)
    output.close()
    assert steps_on_disk() == [9, 8]
    newest, _ = checkpoint.committed(RUN)
    assert checkpoint.read(newest)["config"] == config.as_dict(), "what evaluate and export need"
    newest.write_bytes(newest.read_bytes()[:100])
    again = Output(config)
    claim = again.claim(state, None, first_layout, from_disk=False)
    assert (claim.loaded, state.progress.step) == (False, 10)
    claim.folder.release()
    opened(config, state).close()
    assert state.progress.step == 8
    (note,) = told("note")
    assert str(newest) in note
    opened(small_config(resume="never"), state).close()
    assert told("note") == ["the earlier run in run is now in run.old"]


def test_steps_that_are_taken_again_are_counted(state: TrainState) -> None:
    """From the last commit, or from the start; nothing is said of a run that continues where it had come to."""
    output = opened(small_config(), state)
    for step in (7, 20):
        output.journal.step(replace(STEP, step=step))
    output.close()
    opened(small_config(), state).close()
    (line,) = told("lost")
    lost = 20 - state.progress.step
    assert line.startswith(f"at least {lost} steps lost")
    opened(small_config(), state).close()
    assert told("lost") == [line]


def test_a_rank_that_is_no_longer_the_first_gives_the_folder_up(state: TrainState) -> None:
    """The next rank 0 finds what this one had taken to write; what this one takes from then on is not written."""
    former = opened(small_config(ledger=True), state)
    former.journal.took(Entry(0, (1, 7), 2, (0, 140), 1))
    assert former.store.commit(state)
    former.open(None, state, Place(1, 2))
    assert former.path is None
    assert steps_on_disk() == [7]
    assert [entry.steps for entry in read(RUN / "ledger.jsonl")] == [(1, 7)]
    former.journal.took(Entry(0, (1, 8), 2, (0, 160), 1))
    former.store.save_weights(checkpoint.BEST, state)
    assert not former.commit_last(state)
    opened(small_config(ledger=True), state).close()
    former.close()
    assert not (RUN / checkpoint.BEST).exists()
    assert [entry.steps for entry in read(RUN / "ledger.jsonl")] == [(1, 7)]


def test_a_stopped_rank_0_whose_folder_was_taken_over_writes_nothing(state: TrainState) -> None:
    """The job has gone on without it: neither commits nor weights, ledger, summary or environment are its own."""
    output = opened(small_config(ledger=True), state)
    output.journal.took(Entry(0, (1, 7), 1, (0, 140), 1))
    before = sorted(RUN.rglob("*"))
    run_folder.take_over(RUN)
    assert not output.commit_last(state)
    assert not output.store.commit_last(state).result()
    output.store.save_weights(checkpoint.BEST, state)
    assert not output.write_summary({"top1": 0.0})
    output.write_surroundings(["node1"], None)
    output.close()
    assert sorted(RUN.rglob("*")) == before
    path = RUN / "ledger.jsonl"
    assert not path.exists() or path.read_text() == ""


def test_a_full_disk_is_reported_and_costs_nothing_that_fits_later(
    state: TrainState, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the console and in metrics.jsonl; the exit code rests on what the last commit and the summary answer."""
    output = opened(small_config(), state)
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "writing", full)
        assert not output.write_summary({"top1": 1.0})
        output.write_surroundings(["node1"], None)
        assert not output.commit_last(state)
    assert output.write_summary({"top1": 0.5, "why": "done"})
    assert output.commit_last(state)
    output.close()
    lines = {
        "summary": "cannot write run/summary.json: No space left on device",
        "note": "cannot write environment.json: No space left on device",
    }
    printed = capsys.readouterr().out
    for name, line in lines.items():
        assert (told(name), printed.count(line)) == ([line], 1)
    assert "No space left on device" in told("checkpoint")[0]
    assert steps_on_disk() == [7]
    assert (RUN / "summary.json").read_text() == '{\n  "top1": 0.5,\n  "why": "done"\n}\n'
