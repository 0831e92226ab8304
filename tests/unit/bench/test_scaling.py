"""`hvd-train bench scaling`: one training for each number of workers, and the table."""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from hvd_train import config_file, recipes
from hvd_train.bench import scaling
from hvd_train.errors import UsageError
from hvd_train.launch.child import STOPPING
from tests.support.run_folders import epoch, start, step, write


@pytest.mark.parametrize(
    ("batch", "accumulation", "total", "mode", "workers", "expected"),
    [
        (None, 1, 64, "weak", 4, (256, None)),
        (None, 1, 64, "strong", 4, (64, None)),
        (8, 1, None, "weak", 4, (None, 8)),
        (8, 2, None, "strong", 1, (16, 8)),
        (8, 2, None, "strong", 4, (16, 4)),
    ],
)
def test_weak_scaling_multiplies_the_batch_and_strong_scaling_divides_it(
    batch: Any, accumulation: int, total: Any, mode: str, workers: int, expected: Any
) -> None:
    sizes = {"batch_size": batch, "accumulation_steps": accumulation, "global_batch_size": total}
    found = scaling.sized(recipes.digits().replace(**sizes), workers, mode).batch
    assert (found.global_batch_size, found.batch_size) == expected


def test_a_run_folder_with_other_settings_is_refused() -> None:
    """A run with the same settings resumes."""
    folder = Path("out")
    sizes = scaling.plan(recipes.digits(), [1, 2], "weak", folder)
    Path("out/np-1").mkdir(parents=True)
    Path("out/np-1/config.yaml").write_text(config_file.dump(sizes[1]))
    assert scaling.plan(recipes.digits(), [1, 2], "weak", folder) == sizes
    with pytest.raises(UsageError, match="other settings"):
        scaling.plan(recipes.digits().replace(seed=7), [1, 2], "weak", folder)


def test_each_size_updates_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A size that fails is a row with the reason."""
    monkeypatch.setattr(scaling, "train", Mock(side_effect=["no room", KeyboardInterrupt]))
    sizes = scaling.plan(recipes.digits(), [1, 2], "strong", Path("out"))
    with pytest.raises(KeyboardInterrupt):
        scaling.run(Path("out"), sizes, {"bench": "scaling"}, hosts=(), controller="gloo")
    rows = json.loads(Path("out/scaling.json").read_text())["rows"]
    assert [(row["workers"], row["failed"]) for row in rows] == [(1, "no room")]
    assert "1 worker: no room" in capsys.readouterr().out


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOPPING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def train(program: str) -> str | None:
    line = [sys.executable, "-c", f"import os, signal, sys\nfrom pathlib import Path\n{program}"]
    return scaling.train(line, recipes.digits(), Path("np-2"))


def test_a_failed_training_has_a_reason() -> None:
    """It is the last error since this start, otherwise the exit code."""
    Path("np-2.log").write_text("hvd-train: an old error\n")
    for program, reason in (
        ("print('[1,0]<stderr>:hvd-train: no such data'); sys.exit(2)", "no such data"),
        ("sys.exit(5)", "exit code 5"),
    ):
        assert train(program) == f"{reason} (all it printed: np-2.log)"
    assert train("Path('np-2').mkdir(); Path('np-2/summary.json').write_text('{}')") is None
    assert "digits" in Path("np-2.yaml").read_text()


def test_a_signal_reaches_the_training() -> None:
    """Then the bench stops, too."""
    blocked = "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})"
    program = (
        f"{blocked}\nos.kill({os.getpid()}, signal.SIGTERM)\n"
        "signal.sigwait({signal.SIGTERM})\nprint('ended')"
    )
    with pytest.raises(KeyboardInterrupt):
        train(program)
    assert Path("np-2.log").read_text() == "ended\n"


def test_a_row_has_the_figure_of_its_task() -> None:
    """It is of the test set if there is one."""
    folder = write(Path("np-2"), [start(best="error", higher=False), step(1), epoch(1)])
    summary = {"samples_per_second": 0.0, "steps": 24, "best_error": 0.3, "test_loss": None}
    for facts, value in ((summary, 0.3), ({**summary, "test_error": 0.25}, 0.25)):
        (folder / "summary.json").write_text(json.dumps(facts))
        row = scaling.row_of(2, recipes.digits(), folder)
        assert (row["figure"], row["error"], row["samples_per_second"]) == ("error", value, 100)
        assert (row["steps_per_epoch"], row["epochs"]) == (16, 1.5)
        text = scaling.table([row, {"workers": 1, "failed": "no room"}])
        assert re.search(rf"figure +error\n.* error +{value}\n +1 +— ", text)
        assert text.endswith("\n1 workers failed: no room")
