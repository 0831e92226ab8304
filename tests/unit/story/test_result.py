"""The lines and numbers in which a run says how it began and how it ended."""

from __future__ import annotations

import json
import math
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from hvd_train import recipes
from hvd_train.progress.figures import OF_CLASSES
from hvd_train.progress.order import Cut
from hvd_train.result import Result, describe, ending, last_numbers, ranks, summary
from hvd_train.run_files.records import Ending
from hvd_train.state import TrainState
from hvd_train.world.world import Place

DIGITS = recipes.get("digits")
DONE = Result(
    run_dir=Path("runs/my run"), finished=True, saved=True, stopped_by=None, epochs=20, epoch_share=0.0, steps=460,
    scores={"loss": 0.03, "top1": 0.991, "top5": 1.0}, best=0.997, best_epoch=11,
    test=dict.fromkeys(("loss", "top1", "top5"), math.nan), headline=OF_CLASSES[:2], unit="images",
    why="done", images_per_second=2306.4, world_size=2, seconds=18.2, total_seconds=17.0, peaks={"peak_memory": 5e8},
)  # fmt: skip


@pytest.mark.parametrize(
    ("cut", "size", "said"),
    [
        (Cut(128, 32), 2, "2 ranks on cpu, 128 images a step in 4 slots of 32"),
        (Cut(64, 64), 1, "1 rank on cpu, 64 images a step in 1 slot of 64"),
        (
            Cut(128, 32),
            3,
            "in 4 slots of 32; 4 slots do not divide over 3 ranks: some idle in part of each step",
        ),
        (Cut(64, 32), 3, "in 2 slots of 32; 1 rank of 3 idle (a new run may have smaller slots: --batch-size)"),
    ],
)
def test_the_first_line_says_how_a_step_is_cut(cut: Cut, size: int, said: str) -> None:
    """And when that leaves ranks without work."""
    parts = SimpleNamespace(train_loader=SimpleNamespace(num_samples=1437), device=torch.device("cpu"), unit="images")
    state = TrainState(torch.nn.Linear(2, 2), Mock(), Mock(), cut)
    job = Mock(config=recipes.get("digits"), state=state, world=Mock(place=Place(size=size)), parts=parts)
    assert describe(job).endswith(said)


def test_a_finished_run_says_what_to_type_next() -> None:
    """Scores, speed, files, and the command that evaluates them, with a folder's blank quoted."""
    assert ending(DONE, DIGITS).splitlines() == [
        "done: top-1 99.10% (best 99.70%, epoch 11), 2,306 images/s on 2 ranks, 18 s",
        "files: runs/my run",
        "next:  hvd-train evaluate 'runs/my run'",
    ]
    tested = replace(DONE, test={"loss": 0.25, "top1": 0.9, "top5": 1.0})
    assert "epoch 11), test loss 0.2500, test top-1 90.00%, 2,306" in ending(tested, DIGITS)
    assert ending(replace(DONE, scores={**DONE.scores, "top1": math.nan}), DIGITS).startswith("done: 2,306 images/s")
    part = replace(DONE, why="its total time (--total-time 2h) is over", epochs=3, epoch_share=0.256, best_epoch=None)
    assert ending(part, DIGITS).startswith(
        "its total time (--total-time 2h) is over after 3.26 epochs: top-1 99.10%, 2,306"
    )
    assert ending(replace(DONE, saved=False), DIGITS).endswith("NOT all files could be written (see above)")


@pytest.mark.parametrize("own", [{"model": "mine:model"}, {"data": "mine:data"}])
def test_what_to_type_next_trusts_code_of_your_own(own: dict[str, str]) -> None:
    """The command would otherwise refuse to import it."""
    said = ending(DONE, DIGITS.replace(**own))
    assert said.endswith("\nnext:  hvd-train evaluate 'runs/my run' --trust")


def test_a_stopped_run_says_by_what_and_whether_it_is_committed() -> None:
    """A signal by its name; without one, the time limit with its value where it was over, or else the launcher."""
    stopped = replace(DONE, finished=False, stopped_by=signal.SIGTERM)
    assert ending(stopped, DIGITS) == "stopped by SIGTERM at step 460, committed; the same command goes on from there"
    silent = replace(stopped, stopped_by=None)
    by_time = ending(silent, DIGITS.replace(max_time="2h"), stopped="its time limit (--max-time 2h)")
    assert by_time.startswith("stopped by its time limit (--max-time 2h) at step 460, committed")
    assert ending(silent, DIGITS.replace(max_time="2h")).startswith("stopped by its launcher at step 460, committed")
    so_far = replace(silent, test={"loss": 0.25, "top1": 0.9, "top5": 1.0})
    assert ending(so_far, DIGITS).endswith("\nthe best weights so far: test loss 0.2500, test top-1 90.00%")
    assert ending(replace(stopped, saved=False), DIGITS) == "stopped by SIGTERM at step 460, NOT committed (see above)"


def test_the_summary_is_json_without_nan() -> None:
    """A number that is not known is null, which every reader of JSON takes."""
    values = summary(DONE, recipes.get("digits"))
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert (values["test_loss"], values["recipe"], values["run_dir"]) == (None, "digits", "runs/my run")
    assert [values[name] for name in ("loss", "top1", "top5", "best_top1")] == [0.03, 0.991, 1.0, 0.997]
    assert values["peak_memory"] == 5e8


def test_a_number_of_ranks_in_words() -> None:
    """One rank is no plural."""
    assert [ranks(count) for count in (1, 2)] == ["1 rank", "2 ranks"]


def test_the_last_numbers_are_those_that_are_known() -> None:
    """The best score with its epoch, and the test where there was one; a run that is to go on has none yet."""
    assert last_numbers(DONE) == Ending("finished", {"best/top1": 0.997, "best/epoch": 11})
    tested = replace(DONE, test={"loss": 0.5, "top1": 0.9, "top5": math.nan})
    assert last_numbers(tested).scores == {"best/top1": 0.997, "best/epoch": 11, "test/loss": 0.5, "test/top1": 0.9}
    assert last_numbers(replace(DONE, finished=False)) == Ending("stopped")
