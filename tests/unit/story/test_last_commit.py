"""The commit of survivors if rank 0 and the driver of the job are gone."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvd_train import checkpoint
from hvd_train.membership import commit_for_all
from hvd_train.output import Output
from hvd_train.parts import Own, fresh_state, warm_parts
from hvd_train.progress.order import BatchLayout
from hvd_train.run_files.ledger import Entry
from hvd_train.state import TrainState
from hvd_train.world.world import LocalWorld, Place
from tests.support.runs import convnet, few_digits, small_config, totals
from tests.unit.story.test_output import full

RUN, CONFIG = Path("run"), small_config(ledger=True)


@pytest.fixture
def state() -> Iterator[TrainState]:
    """Return the state of a survivor after seven steps, of which rank 0 has committed five."""
    world = LocalWorld()
    parts, optimizer = warm_parts(CONFIG, world, Own(convnet, few_digits))
    state = fresh_state(CONFIG, world, parts, optimizer)
    rank_0 = Output(CONFIG)
    rank_0.open(rank_0.claim(state, None, lambda: BatchLayout(20, 20), from_disk=True), state, Place())
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
    state.count_step(totals(), skipped=False)
    step, cursor = state.progress.step, state.progress.cursor
    return state.took(Entry(0, (step, step), 3, (cursor - 20, cursor), fingerprint=step), num_samples=190)


def commit(state: TrainState) -> str:
    output = Output(CONFIG)
    try:
        return commit_for_all(output, CONFIG, state, RUN)
    finally:
        output.close()


def newest() -> int:
    return checkpoint.newest_good(RUN, pytest.fail)["progress"]["step"]


def test_the_first_survivor_commits(state: TrainState) -> None:
    """The ledger gets the steps that rank 0 had not written."""
    assert commit(state) == "committed in run/checkpoints/step-0000000007.ckpt; the same command resumes from there"
    assert commit(state) == "committed by another rank; the same command resumes from there"
    assert newest() == 7
    events = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
    (line,) = [event["message"] for event in events if event.get("name") == "rescued"]
    assert line.startswith("rank 0 is gone: step 7 is committed in run/checkpoints/step-0000000007.ckpt by ")
    assert json.loads((RUN / "ledger.jsonl").read_text().splitlines()[-1])["steps"][1] == 7


def test_the_survivor_that_has_done_most_steps_wins(state: TrainState) -> None:
    """A damaged file of a later step does not count."""
    checkpoint.path_of(RUN, 9).write_bytes(b"rotten")
    commit(state)
    step_done(state)
    assert commit(state).startswith("committed in")
    assert checkpoint.read(checkpoint.path_of(RUN, 8))["progress"]["step"] == 8


def test_a_step_that_is_not_kept_is_reported(state: TrainState, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is not called a commit."""
    monkeypatch.setattr(checkpoint, "write_into", full)
    assert commit(state).startswith("NOT committed (see above)")
    assert "rescued" not in (RUN / "metrics.jsonl").read_text()
