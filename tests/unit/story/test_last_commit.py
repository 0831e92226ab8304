"""What becomes of the last step where the rank that writes is gone, and with it the driver of the job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvd_train import checkpoint, last_commit
from hvd_train.last_commit import commit_for_all
from hvd_train.launch import launcher
from hvd_train.output import Output
from hvd_train.parts import Own, fresh_state, warm_parts
from hvd_train.progress.metrics import Totals
from hvd_train.progress.order import Cut
from hvd_train.run_files import run_folder
from hvd_train.run_files.ledger import Entry
from hvd_train.run_files.run_folder import RunFolder
from hvd_train.state import TrainState
from hvd_train.world.world import LocalWorld, Place
from tests.support.runs import convnet, few_digits, small_config

RUN, CONFIG = Path("run"), small_config(ledger=True)


@pytest.fixture
def state() -> Iterator[TrainState]:
    """The state of a survivor after seven steps, of which rank 0 has committed and written down the first five."""
    world = LocalWorld()
    parts, optimizer = warm_parts(CONFIG, world, Own(convnet, few_digits))
    state = fresh_state(CONFIG, world, parts, optimizer)
    rank_0 = Output(CONFIG)
    rank_0.open(rank_0.claim(state, None, lambda: Cut(20, 20), from_disk=True), state, Place())
    for step in range(1, 8):
        entry = step_done(state)
        if step <= 5:
            rank_0.journal.took(entry)
        if step == 5:
            assert rank_0.commit_last(state)
    rank_0.close()
    yield state
    parts.train_loader.close()


def step_done(state: TrainState) -> Entry:
    """Count one more step, and return the entry of the ledger that it is part of."""
    state.count_step(Totals((1.0, 2.0, 1.0), 20), skipped=False)
    step, cursor = state.progress.step, state.progress.cursor
    return state.took(Entry(0, (step, step), 3, (cursor - 20, cursor), fingerprint=step), num_samples=190)


def commit(state: TrainState) -> str:
    """What a survivor says has become of its state; it gives the folder up, as its process ends then."""
    output = Output(CONFIG)
    try:
        return commit_for_all(output, CONFIG, state, RUN)
    finally:
        output.close()


def newest() -> int:
    """The step of the newest checkpoint."""
    snapshot = checkpoint.newest_good(RUN, pytest.fail)
    assert snapshot is not None
    return int(snapshot["progress"]["step"])


def test_the_first_survivor_commits_and_the_second_ends_in_peace(state: TrainState) -> None:
    """One line says which step is in which file; the ledger has the steps that the dead rank had not written."""
    assert commit(state) == "committed in run/checkpoints/step-0000000007.ckpt; the same command goes on from there"
    assert commit(state) == "committed by another rank; the same command goes on from there"
    assert newest() == 7
    events = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
    (told,) = [event["message"] for event in events if event.get("name") == "rescued"]
    assert told.startswith("rank 0 is gone: step 7 is committed in run/checkpoints/step-0000000007.ckpt by ")
    assert json.loads((RUN / "ledger.jsonl").read_text().splitlines()[-1])["steps"][1] == 7


@pytest.mark.parametrize("ahead_comes", ["first", "last"])
def test_the_survivor_that_has_done_more_wins(ahead_comes: str, state: TrainState) -> None:
    """Survivors may differ by one step, and come in any order."""
    if ahead_comes == "last":
        commit(state)
    step_done(state)
    commit(state)
    assert newest() == 8


def test_a_damaged_commit_is_none(state: TrainState) -> None:
    """A file of a later step that cannot be read must not keep a good one from being written."""
    checkpoint.path_of(RUN, 9).write_bytes(b"rotten")
    assert commit(state).startswith("committed in")
    assert checkpoint.path_of(RUN, 7).exists()


def held() -> RunFolder:
    """The claim of another process on the folder."""
    from datetime import datetime

    return run_folder.claim(CONFIG, datetime.now())


def test_a_folder_that_another_process_has_is_not_taken(state: TrainState, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the living part of the job, from which this rank is cut off: the step is kept beside the commits."""
    monkeypatch.setattr(last_commit, "_PATIENCE_S", 0.0)
    other = held()
    before = (RUN / "ledger.jsonl").read_text()
    told = commit(state)
    assert told.startswith("in run/checkpoints/step-0000000007-of-")
    assert (newest(), other.held(), (RUN / "ledger.jsonl").read_text()) == (5, True, before)
    aside, path = told.partition("`mv ")[2].partition("`")[0].split()
    other.release()
    Path(aside).rename(path)
    assert newest() == 7
    assert checkpoint.read(Path(path))["config"] == CONFIG.as_dict(), "what a run that resumes compares its own with"


def test_a_lock_that_outlives_its_host_is_waited_for(state: TrainState, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server gives it back after a while."""
    other = held()
    monkeypatch.setattr(last_commit.time, "sleep", lambda seconds: other.release())
    assert commit(state).startswith("committed in")


def test_the_commit_of_the_one_that_has_the_folder_is_enough(
    state: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job goes on elsewhere: this rank ends in peace."""
    _other = held()
    later = checkpoint.read(checkpoint.path_of(RUN, 5))
    monkeypatch.setattr(last_commit.time, "sleep", lambda _: checkpoint.write(checkpoint.path_of(RUN, 8), later))
    assert commit(state).startswith("committed by another rank")


def test_a_folder_that_is_gone_is_told(state: TrainState) -> None:
    """With the reason."""
    (RUN / run_folder.CONFIG).unlink()
    assert commit(state).startswith("NOT committed: --output-dir run is not empty and not a run")


def test_a_commit_that_comes_between_the_look_and_the_lock_is_enough(
    state: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another survivor was faster: its commit stays as it is, and nothing more is told in the run."""
    path, claim = checkpoint.path_of(RUN, 7), run_folder.claim

    def slow(*given: Any, **named: Any) -> RunFolder:
        checkpoint.write(path, checkpoint.read(checkpoint.path_of(RUN, 5)))
        return claim(*given, **named)

    monkeypatch.setattr(run_folder, "claim", slow)
    before = (RUN / "ledger.jsonl").read_text()
    assert commit(state) == "committed by another rank; the same command goes on from there"
    assert checkpoint.read(path)["progress"]["step"] == 5
    assert (RUN / "ledger.jsonl").read_text() == before
    assert "rescued" not in (RUN / "metrics.jsonl").read_text()


def test_a_step_that_cannot_be_kept_anywhere_is_told(
    state: TrainState, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the reason, and without the line that says where it is."""
    monkeypatch.setattr(last_commit, "_PATIENCE_S", 0.0)
    _other = held()

    def full(path: Path, content: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write", full)
    told = commit(state)
    assert told.startswith("NOT committed: another process has the run folder, and run/checkpoints/step-0000000007-of-")
    assert told.endswith(".ckpt cannot be written (No space left on device)")
    assert "another process has the run folder" not in capsys.readouterr().err


def test_a_commit_that_fails_in_the_folder_is_told(state: TrainState, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system has said why; nobody is told that the step is safe."""
    monkeypatch.setattr(Output, "commit_last", lambda self, state: False)
    assert commit(state) == "NOT committed (see above); the same command goes on from the last commit"
    assert "rescued" not in (RUN / "metrics.jsonl").read_text()


def test_the_folder_is_claimed_for_the_job_that_this_process_is_of(
    state: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another survivor of it, and a run that starts meanwhile, can tell whose the claim is."""
    owners: list[object] = []
    claim = run_folder.claim

    def noted(*given: Any, **named: Any) -> RunFolder:
        owners.append(named["owner"])
        return claim(*given, **named)

    monkeypatch.setattr(launcher, "owner", lambda environment: "this job")
    monkeypatch.setattr(run_folder, "claim", noted)
    commit(state)
    assert owners == ["this job"]
