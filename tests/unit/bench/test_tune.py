"""What `hvd-train tune` makes of the times it has measured."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hvd_train.bench import tune
from hvd_train.bench.tune import Ranks, Settings
from hvd_train.errors import UsageError
from hvd_train.launch import tuned
from hvd_train.launch.tuned import CACHE, CYCLE, DEFAULTS, FUSION

AUTOTUNED = {FUSION: "8388608", CYCLE: "3.00"}


@dataclass(frozen=True)
class Known(Ranks):
    """Ranks whose steps take known times: `factor` with the settings of the autotune, 1 else, and some noise."""

    launcher: Sequence[str] = ("horovodrun", "-np", "2")
    command: Sequence[str] = ("hvd-train", "tune", "digits")
    turn_s: float = 1.0
    factor: float = 1.0
    chance: random.Random = field(default_factory=lambda: random.Random(2))

    def seconds(self, settings: Settings) -> float:
        """The time of a step, which is known here."""
        return (self.factor if settings == AUTOTUNED else 1.0) * self.chance.uniform(0.95, 1.05)

    def autotuned(self) -> dict[str, str]:
        """A proposal."""
        return AUTOTUNED


@pytest.mark.parametrize(("factor", "found"), [(0.8, AUTOTUNED), (1.0, {}), (1.3, {})])
def test_only_what_is_faster_for_sure_is_kept(factor: float, found: Settings) -> None:
    """Else the file holds the defaults; either way it can be read, and says what was measured."""
    said: list[str] = []
    path = Path("tuned.env")
    tune.tune(Known(factor=factor), path, 10, said.append)
    assert tuned.read(path) == {**DEFAULTS, **found}
    assert ("these are faster" in path.read_text()) == bool(found)
    assert "95% interval" in path.read_text()
    assert said[0].startswith("33 short trainings of about 1 s each, which take some 6 s to start: about 3:51 in all")
    counted = [int(line.split(" of 33, ")[0]) for line in said[1:-2]]
    assert counted == [*range(1, 14), *range(15, 34, 2)]
    assert said[-1].endswith("hvd-train train --tuned tuned.env")


@pytest.mark.parametrize(
    ("ratio", "words"), [(0.75, "1.33x faster"), (1.25, "1.25x slower"), (0.998, "as fast"), (1.004, "as fast")]
)
def test_a_time_is_told_as_a_speed(ratio: float, words: str) -> None:
    """A step that takes three quarters of the time is a third faster."""
    assert tune.pace(ratio) == words


def test_what_is_left_follows_from_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first job it is what was expected of each."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    progress = tune.Progress(10, job_s=9)
    assert progress.left_s() == 90
    now[0] = 140.0
    assert progress.count(2) == "  2 of 10, 2:40 left: "


def test_the_log_of_autotune_counts_once_it_ends_with_the_best() -> None:
    """Until then its last line is only one more sample."""
    lines = ["hierarchical_allreduce,...", *["0,0,0, 1,5,4,500.5"] * 13]
    path = Path("autotune.csv")
    assert tune.proposal(path) is None
    path.write_text("\n".join(lines))
    assert tune.proposal(path) is None
    path.write_text("\n".join([*lines, "0,0,0, 1,9.00817,3.5,600.1"]))
    assert tune.proposal(path) == {FUSION: "3670016", CYCLE: "9.01"}


@pytest.mark.parametrize("case", ["exists", "no folder", "set"])
def test_nothing_starts_where_nothing_could_come_of_it(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An existing file is kept, a missing folder is named, and a setting of the user's own is not played with."""
    path = Path("deep" if case == "no folder" else ".") / "tuned.env"
    if case == "exists":
        path.write_text("mine")
    if case == "set":
        monkeypatch.setenv(CACHE, "10")
    with pytest.raises(UsageError):
        tune.check(path)
    assert case != "exists" or path.read_text() == "mine"
