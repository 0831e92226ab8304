"""The last lines of a run, and its summary."""

import json
import math
import signal
from dataclasses import replace
from pathlib import Path

from hvd_train import recipes
from hvd_train.training import Result, ending, summary

DIGITS = recipes.get("digits")
DONE = Result(
    run_dir=Path("runs/my run"), finished=True, saved=True, stopped_by=None, epochs=20, steps=460, loss=0.03,
    top1=0.991, top5=1.0, best_top1=0.997, best_epoch=11, test_loss=math.nan, test_top1=math.nan, test_top5=math.nan,
    why="done", images_per_second=2306.4, world_size=2, seconds=18.2,
)  # fmt: skip


def test_a_finished_run_prints_the_next_command() -> None:
    """The command is quoted, and has --trust for the user's own code."""
    assert ending(DONE, DIGITS).splitlines() == [
        "done: top-1 99.10% (best 99.70%, epoch 11), 2,306 images/s on 2 ranks, 18 s",
        "files: runs/my run",
        "next:  hvd-train evaluate 'runs/my run'",
    ]
    assert ending(replace(DONE, saved=False), DIGITS).endswith("NOT all files could be written (see above)")
    for own in ({"model": "mine:model"}, {"data": "mine:data"}):
        assert ending(DONE, DIGITS.replace(**own)).endswith("\nnext:  hvd-train evaluate 'runs/my run' --trust")


def test_a_stopped_run_names_the_signal_and_the_commit() -> None:
    stopped = replace(DONE, finished=False, stopped_by=signal.SIGTERM)
    assert ending(stopped, DIGITS) == "stopped by SIGTERM at step 460, committed; the same command resumes from there"
    assert ending(replace(stopped, saved=False), DIGITS) == "stopped by SIGTERM at step 460, NOT committed (see above)"


def test_the_summary_is_json_without_nan() -> None:
    values = summary(DONE, DIGITS)
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert (values["test_loss"], values["recipe"], values["run_dir"]) == (None, "digits", "runs/my run")
