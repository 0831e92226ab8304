"""The last lines of a run, and its summary."""

import json
import signal
from dataclasses import replace

from hvd_train import recipes
from hvd_train.result import ending, summary
from tests.support.runs import CLASSIFY, DONE


def test_a_finished_run_prints_the_next_command() -> None:
    assert ending(DONE, CLASSIFY).splitlines() == [
        "done: top-1 99.10% (best 99.70%, epoch 11), 2,306 images/s on 2 ranks, 18 s",
        "files: runs/my run",
        "next:  hvd-train report 'runs/my run'",
    ]
    assert ending(replace(DONE, saved=False), CLASSIFY).endswith(
        "NOT all files could be written (see above)"
    )


def test_a_stopped_run_names_the_signal_and_the_commit() -> None:
    stopped = replace(DONE, finished=False, stopped_by=signal.SIGTERM)
    line = "stopped by SIGTERM at step 460, "
    assert ending(stopped, CLASSIFY) == f"{line}committed; the same command resumes from there"
    assert ending(replace(stopped, saved=False), CLASSIFY) == f"{line}NOT committed (see above)"


def test_the_summary_is_json_without_nan() -> None:
    values = json.loads(json.dumps(summary(DONE, recipes.get("digits")), allow_nan=False))
    assert values["best_loss"] is None
    assert values["run_dir"] == "runs/my run"
