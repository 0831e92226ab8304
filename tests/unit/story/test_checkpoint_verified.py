"""Commits that say whether all ranks held the same state: which are kept, and which are gone on from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hvd_train import checkpoint
from hvd_train.checkpoint import aside, is_verified, newest_good, newest_verified, path_of
from hvd_train.errors import RankLost
from tests.support import runs
from tests.support.runs import small_config, trained
from tests.support.worlds import ThreadWorld, run_ranks
from tests.unit.story.test_checkpoint import commit_next, state_at, steps_on_disk, store
from tests.unit.story.test_training_differ import events, flip_a_bit, spoiled

RUN = Path("run")


def commit(*steps: tuple[int, bool], keep: int = 9) -> None:
    """Commit these steps, each of which is verified or not."""
    disk = store(RUN, keep=keep)
    for step, verified in steps:
        state = state_at(step)
        state.verified_step = step if verified else step - 1
        commit_next(disk, state)
    disk.close()


def test_a_file_says_whether_it_is_verified() -> None:
    """In its second line, for people as for programs; a file without that word is not."""
    commit((1, True), (2, False))
    assert [is_verified(path_of(RUN, step)) for step in (1, 2)] == [True, False]
    head = path_of(RUN, 1).read_bytes().splitlines()[1]
    assert json.loads(head)["verified"] is True
    old = path_of(RUN, 1).read_bytes().replace(b'"verified": true, ', b" " * 18)
    path_of(RUN, 1).write_bytes(old)
    assert not is_verified(path_of(RUN, 1))
    assert checkpoint.read(path_of(RUN, 1))["progress"]["step"] == 1


@pytest.mark.parametrize("keep", [1, 2])
def test_the_newest_verified_one_is_never_dropped(keep: int) -> None:
    """However many come after it; with the next one that is verified it goes."""
    commit((1, True), (2, True), (3, False), (4, False), (5, False), keep=keep)
    assert steps_on_disk(RUN) == [*[5, 4][:keep], 2]
    commit((6, True), keep=keep)
    assert steps_on_disk(RUN) == [6, 5][:keep]


def test_a_resumed_run_goes_on_from_the_newest_one_and_says_how_to_go_back() -> None:
    """No finished step is lost; what it says to type is what it takes."""
    commit((1, True), (2, True), (3, False))
    told: list[str] = []
    snapshot = newest_good(RUN, told.append)
    assert snapshot is not None
    assert snapshot["progress"]["step"] == 3
    (line,) = told
    assert line.endswith(
        f"is of step 2: to go back to it, stop and type `mv {path_of(RUN, 3)} {aside(path_of(RUN, 3))}`"
    )
    path_of(RUN, 3).rename(aside(path_of(RUN, 3)))
    told.clear()
    snapshot = newest_good(RUN, told.append)
    assert snapshot is not None
    assert (snapshot["progress"]["step"], told) == (2, [])


def test_where_ranks_differ_the_newest_verified_one_is_taken_and_newer_ones_are_set_aside() -> None:
    """They are kept under names from which no run goes on; a damaged one is named, and is neither."""
    commit((1, True), (2, True), (3, True), (4, False), (5, False))
    path_of(RUN, 3).write_bytes(path_of(RUN, 3).read_bytes()[:-1])
    told: list[str] = []
    snapshot = newest_verified(RUN, told.append)
    assert snapshot is not None
    assert snapshot["progress"]["step"] == 2
    assert steps_on_disk(RUN) == [3, 2, 1]
    assert sorted(path.name for path in RUN.glob("checkpoints/*-doubted.ckpt")) == [
        "step-0000000004-doubted.ckpt",
        "step-0000000005-doubted.ckpt",
    ]
    damaged, *gone = told
    assert "is truncated" in damaged
    assert [line.split(";")[0] for line in gone] == ["going back to step 2, in which all ranks agreed"] * 2


def test_without_a_verified_one_the_newest_is_taken() -> None:
    """There is nothing better; nothing is moved."""
    commit((1, False), (2, False))
    snapshot = newest_verified(RUN, lambda told: None)
    assert snapshot is not None
    assert snapshot["progress"]["step"] == 2
    assert steps_on_disk(RUN) == [2, 1]


def test_what_is_committed_when_a_rank_is_lost_is_not_verified() -> None:
    """All other commits of a training are, the last one too."""
    config = small_config(commit_steps=4, keep_checkpoints=100, epochs=1)
    run_ranks(2, lambda world: trained(world, config))
    assert all(map(is_verified, checkpoint.committed(RUN)))

    def body(world: ThreadWorld) -> None:
        def lose(model: torch.nn.Module) -> None:
            raise RankLost("rank 1 is gone")

        with pytest.raises(RankLost, match="is committed"):
            trained(world, config.replace(output_dir=Path("lost")), spoiled(world, 0, range(46, 47), lose))

    run_ranks(1, body)
    newest, *others = checkpoint.committed(Path("lost"))
    assert checkpoint.step_of(newest) % 4 != 0
    assert not is_verified(newest)
    assert len(others) > 1
    assert all(map(is_verified, others))


def test_ranks_that_differ_go_back_past_a_commit_that_was_not_verified() -> None:
    """A commit that a broken rank had spoiled before it was lost leaves no trace once a difference shows."""
    config = small_config(commit_steps=4, keep_checkpoints=100, epochs=2)
    undisturbed = run_ranks(2, lambda world: trained(world, config))
    spoilt = path_of(RUN, 9)
    for path in checkpoint.committed(RUN):
        if path.name > spoilt.name:
            path.unlink()
    (verified, *_) = checkpoint.committed(RUN)
    snapshot = checkpoint.read(verified)
    snapshot["model"]["4.weight"] += 1
    snapshot["progress"]["step"] = 9
    checkpoint.write(spoilt, snapshot)
    assert not is_verified(spoilt)
    results = run_ranks(2, lambda world: trained(world, config, spoiled(world, 1, range(2, 3), flip_a_bit)))
    for (_, weights), (_, expected) in zip(results, undisturbed, strict=True):
        assert runs.equal(weights, expected)
    assert aside(spoilt).exists()
    assert any("going back to step 8" in event["message"] for event in events("note"))


def test_where_gradients_were_wrong_later_commits_are_passed_over() -> None:
    """A commit from before the last step that was found right is taken, if there is one; else the newest."""
    commit((10, True), (20, True), (30, True))
    snapshot = newest_verified(RUN, lambda told: None, not_after=25)
    assert snapshot is not None
    assert (snapshot["progress"]["step"], steps_on_disk(RUN)) == (20, [20, 10])
    snapshot = newest_verified(RUN, lambda told: None, not_after=5)
    assert snapshot is not None
    assert (snapshot["progress"]["step"], steps_on_disk(RUN)) == (20, [20, 10])
