"""The sections on the course of a run."""

from __future__ import annotations

from pathlib import Path

from tests.support.pages import composed, section
from tests.support.run_folders import elastic_run, start, step, whole_run, write


def test_worlds_and_recoveries_are_marked() -> None:
    """In the curves, in the throughput, and in a table with what each change has cost."""
    text = composed(write(Path("run"), elastic_run()))
    for part in ("Learning curves", "Throughput"):
        for label in ("3→2", "recovered", "resumed"):
            assert label in section(text, part)
    assert "a rank was lost" in section(text, "Throughput")
    assert "<td>3.5</td>" in section(text, "Throughput")


def test_the_spread_over_ranks() -> None:
    """The slowest rank, and its times beside those of the others; nothing of a run on one rank."""
    ranks = {"work": [0.01, 0.02, 0.09, 3], "forward": [0.005, 0.006, 0.07, 3]}
    several = write(Path("several"), [start(), step(1, split={"data": 0.1}, ranks=ranks)])
    part = section(composed(several, write(Path("alone"), whole_run())), "Where the time goes")
    for text in ("Over the ranks", "rank 3", "90.00 / 20.00 ms", "70.00 / 6.00 ms"):
        assert text in part
    assert "Over the ranks" not in composed(write(Path("one"), [start(), step(1, split={"data": 0.1}, ranks=None)]))


def test_the_time_split() -> None:
    """Milliseconds and shares of each part; a run without one is a gap beside one that has it."""
    parts = ("data", "forward", "backward", "reduction", "optimizer", "other")
    split = dict(zip(parts, (0.01, 0.02, 0.04, 0.02, 0.005, 0.005), strict=True))
    new = write(Path("new"), [start(), step(1, split=split)])
    part = section(composed(new, write(Path("old"), whole_run())), "Where the time goes")
    assert "100.00 ms" in part
    assert "40.00 ms · 40%" in part
    assert "old: no time split" in part
