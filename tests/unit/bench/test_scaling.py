"""The trainings of `bench scaling`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hvd_train import config_file, recipes
from hvd_train.bench import scaling, scaling_job
from hvd_train.bench.scaling_job import Size
from hvd_train.errors import UsageError


@pytest.mark.parametrize(
    ("batch", "weak", "strong"),
    [
        ({"global_batch_size": 64}, {1: (64, None), 4: (256, None)}, {1: (64, None), 4: (64, None)}),
        ({"batch_size": 8, "global_batch_size": None}, {1: (None, 8), 4: (None, 8)}, {1: (8, 8), 4: (8, 2)}),
        (
            {"batch_size": 8, "global_batch_size": None, "accumulation_steps": 2},
            {4: (None, 8)},
            {1: (16, 8), 2: (16, 8), 4: (16, 4)},
        ),
        ({"batch_size": 8, "global_batch_size": 64}, {4: (256, 8)}, {4: (64, 8)}),
    ],
)
def test_the_batch_grows_with_the_workers_or_stays(
    batch: dict[str, Any], weak: dict[int, Any], strong: dict[int, Any]
) -> None:
    """Weak scaling gives each worker what one alone takes, strong scaling all of them together, in few passes."""
    settings = recipes.get("digits").replace(**batch)
    for mode, expected in (("weak", weak), ("strong", strong)):
        for workers, (total, per_worker) in expected.items():
            found = scaling.sized(settings, workers, mode).batch
            assert (found.global_batch_size, found.batch_size) == (total, per_worker), (mode, workers)


def test_a_time_limit_ends_the_training_of_a_size() -> None:
    """Each size is trained once: what is stopped by its limit would otherwise never be done."""
    limited = scaling.ended_by_time(recipes.get("digits").replace(max_time="2h"))
    assert (limited.run.max_time, limited.schedule.total_time) == (None, "2h")
    assert scaling.ended_by_time(recipes.get("digits")) == recipes.get("digits")
    with pytest.raises(UsageError, match="leave out --max-time"):
        scaling.ended_by_time(recipes.get("digits").replace(max_time="2h", total_time="1h"))


def test_a_plan_leaves_other_runs_alone() -> None:
    """A folder below with other settings is another run; with the same ones it is where the last command got to."""
    folder = Path("out")
    sizes = scaling.plan(recipes.digits(), [1, 2], "weak", folder)
    assert [str(size) for size in sizes] == ["1 worker", "2 workers"]
    sizes[0].folder.mkdir(parents=True)
    (sizes[0].folder / "config.yaml").write_text(config_file.dump(sizes[0].config))
    assert scaling.plan(recipes.digits(), [1, 2], "weak", folder) == sizes
    with pytest.raises(UsageError, match="other settings"):
        scaling.plan(recipes.digits().replace(seed=7), [1, 2], "weak", folder)


def test_what_a_job_has_printed_does_not_act_on_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last line of a job that failed is in the line of its size, and in the table."""
    monkeypatch.setattr(scaling_job, "train", lambda line, size: "no \x1b[2J room")
    sizes = scaling.plan(recipes.digits(), [1], "strong", Path("out"))
    scaling.run(sizes, "strong", Path("out"), {"bench": "scaling"}, host_file=None, controller="gloo")
    printed = capsys.readouterr().out
    assert printed.count("no \ufffd[2J room") == 2
    assert "\x1b" not in printed


def test_the_table_is_written_after_each_size(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One size that fails is a row with the reason; when the next one is stopped, the row is in all files already."""

    def train(line: Sequence[str], size: Size) -> str | None:
        if size.workers == 2:
            raise KeyboardInterrupt
        return "no room"

    monkeypatch.setattr(scaling_job, "train", train)
    sizes = scaling.plan(recipes.digits(), [1, 2], "strong", Path("out"))
    with pytest.raises(KeyboardInterrupt):
        scaling.run(sizes, "strong", Path("out"), {"bench": "scaling"}, host_file=None, controller="gloo")
    rows = json.loads(Path("out/scaling.json").read_text())["rows"]
    assert [(row["workers"], row["failed"]) for row in rows] == [(1, "no room")]
    assert "1 workers failed: no room" in Path("out/scaling.txt").read_text()
    assert capsys.readouterr().out.endswith("2 workers: stopped; the same command goes on from there\n")
