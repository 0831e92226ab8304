"""What elastic training guarantees where a rank dies while it writes files that all wait for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvd_train import checkpoint
from hvd_train.checkpoint import DiskStore
from hvd_train.run_files.ledger import audit
from hvd_train.state import TrainState
from hvd_train.world.world import Request
from tests.support.elastic import ElasticThreadWorld
from tests.support.fault_plays import ONE, STEPS, THREE, TOLERANCE, TWO, best_weights, check, play, undisturbed
from tests.support.runs import largest_difference
from tests.support.worlds import Killed


def test_the_best_weights_survive_the_rank_that_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies after an evaluation, before model-best.pt is there; another rank writes the same weights."""
    save = DiskStore.save_weights
    deaths = [Killed("while it writes the best weights")]

    def dies_once(store: DiskStore, name: str, state: TrainState) -> None:
        if name == checkpoint.BEST and deaths:
            raise deaths.pop()
        save(store, name, state)

    monkeypatch.setattr(DiskStore, "save_weights", dies_once)
    job, folder = play([], ONE, TWO)
    check(job, folder, undisturbed())
    assert not deaths
    assert largest_difference(*best_weights(folder)) <= TOLERANCE


@pytest.mark.parametrize("file", ["write", "write_weights"])
def test_a_rank_that_dies_while_it_writes_the_last_files_is_replaced(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank leaves before they are on disk, so another one writes them, from its live weights."""
    writes = getattr(checkpoint, file)
    deaths = [Killed("while it writes the last files")]

    def dies_once(path: Path, *rest: Any) -> None:
        if deaths and ("final" in path.name or path.name == f"step-{STEPS:010}.ckpt"):
            raise deaths.pop()
        writes(path, *rest)

    monkeypatch.setattr(checkpoint, file, dies_once)
    job, folder = play([], ONE, TWO, THREE, most=3)
    check(job, folder, undisturbed())
    assert not deaths
    assert job.sizes[1] == 2
    assert len(job.results) == 2
    assert all(result.finished and result.saved for result, _ in job.results)
    assert checkpoint.committed(folder)[0] == checkpoint.path_of(folder, STEPS)
    assert (folder / "summary.json").exists()


def test_a_rank_that_dies_while_it_commits_a_stop_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank leaves before the last commit is on disk, so another one writes it, and says that it is."""
    write = checkpoint.write
    deaths = [Killed("while it commits")]

    class Stopped(ElasticThreadWorld):
        def requested(self, *, told_to_end: bool = False) -> Request:
            return "stop" if self._job.steps >= 6 else super().requested(told_to_end=told_to_end)

    def dies_once(path: Path, *rest: Any) -> None:
        if deaths:
            raise deaths.pop()
        write(path, *rest)

    monkeypatch.setattr(checkpoint, "write", dies_once)
    job, folder = play([], ONE, TWO, most=2, kind=Stopped)
    assert not deaths
    results = [result for result, _ in job.results]
    assert [(result.finished, result.saved) for result in results] == [(False, True)] * len(results)
    assert checkpoint.committed(folder)[0] == checkpoint.path_of(folder, results[0].steps)
    assert audit(folder).faults == ()
