"""`hvd-train bench scaling`: one job for each number of workers, and the table."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hvd_train import config_file, recipes
from hvd_train.bench import scaling
from hvd_train.bench.scaling import Size
from hvd_train.errors import UsageError


@pytest.mark.parametrize(
    ("batch", "accumulation", "total", "mode", "expected"),
    [
        (None, 1, 64, "weak", {1: (64, None), 4: (256, None)}),
        (None, 1, 64, "strong", {1: (64, None), 4: (64, None)}),
        (8, 1, None, "weak", {1: (None, 8), 4: (None, 8)}),
        (8, 2, None, "strong", {1: (16, 8), 2: (16, 8), 4: (16, 4)}),
        (8, 1, 64, "weak", {4: (256, 8)}),
        (8, 1, 64, "strong", {4: (64, 8)}),
    ],
)
def test_the_batch_grows_with_the_workers_or_stays(
    batch: int | None, accumulation: int, total: int | None, mode: str, expected: dict[int, Any]
) -> None:
    """Weak scaling multiplies the global batch by the workers; strong scaling divides it among them."""
    sizes = {"batch_size": batch, "accumulation_steps": accumulation, "global_batch_size": total}
    settings = recipes.get("digits").replace(**sizes)
    for workers, wanted in expected.items():
        found = scaling.sized(settings, workers, mode).batch
        assert (found.global_batch_size, found.batch_size) == wanted


def test_a_plan_leaves_other_runs_alone() -> None:
    """A run folder with other settings is refused; one with the same settings continues."""
    folder = Path("out")
    sizes = scaling.plan(recipes.digits(), [1, 2], "weak", folder)
    sizes[0].folder.mkdir(parents=True)
    (sizes[0].folder / "config.yaml").write_text(config_file.dump(sizes[0].config))
    assert scaling.plan(recipes.digits(), [1, 2], "weak", folder) == sizes
    with pytest.raises(UsageError, match="other settings"):
        scaling.plan(recipes.digits().replace(seed=7), [1, 2], "weak", folder)


def test_the_table_is_written_after_each_size(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A size that fails is a row with the reason, printed without control characters, also if the next is stopped."""

    def train(line: Sequence[str], size: Size) -> str | None:
        if size.workers == 2:
            raise KeyboardInterrupt
        return "no \x1b[2J room"

    monkeypatch.setattr(scaling, "train", train)
    sizes = scaling.plan(recipes.digits(), [1, 2], "strong", Path("out"))
    with pytest.raises(KeyboardInterrupt):
        scaling.run(sizes, Path("out"), {"bench": "scaling"}, host_file=None, controller="gloo")
    rows = json.loads(Path("out/scaling.json").read_text())["rows"]
    assert [(row["workers"], row["failed"]) for row in rows] == [(1, "no \x1b[2J room")]
    assert "1 workers failed: no" in Path("out/scaling.txt").read_text()
    printed = capsys.readouterr().out
    assert "no \ufffd[2J room" in printed
    assert "\x1b" not in printed


def size() -> Size:
    return Size(2, recipes.digits(), Path("np-2"))


def line(program: str) -> list[str]:
    return [sys.executable, "-c", f"import os, signal, sys\nfrom pathlib import Path\n{program}"]


def test_a_training_has_finished_or_there_is_a_reason() -> None:
    """The reason is the last error since this start, or else the exit code."""
    Path("np-2.log").write_text("hvd-train: an error of yesterday\n")
    for program, reason in (
        ("print('[1,0]<stderr>:hvd-train: no such data'); sys.exit(2)", "no such data"),
        ("raise ValueError('broken')", "ValueError: broken"),
        ("sys.exit(5)", "exit code 5"),
    ):
        assert scaling.train(line(program), size()) == f"{reason} (all it printed: np-2.log)"
    assert scaling.train(line("Path('np-2').mkdir(); Path('np-2/summary.json').write_text('{}')"), size()) is None
    assert "digits" in Path("np-2.yaml").read_text()


def test_a_signal_reaches_the_training() -> None:
    """SIGTERM is passed on; the training ends in its own way, and then the bench stops."""
    blocked = "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})"
    program = (
        f"{blocked}\nos.kill({os.getpid()}, signal.SIGTERM)\nsignal.sigwait({{signal.SIGTERM}})\nprint('committed')"
    )
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        scaling.train(line(program), size())
    assert Path("np-2.log").read_text() == "committed\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_efficiency_goes_by_the_smallest_size_that_ran() -> None:
    """Efficiency is speed per worker over the base's; a size that failed has none and is no base."""
    rows = [{"workers": n, "images_per_second": speed} for n, speed in ((1, None), (2, 100.0), (4, 150.0), (8, None))]
    scaling.add_efficiency(rows)
    assert [row.get("efficiency") for row in rows] == [None, 1.0, 0.75, None]
