"""What it costs a rank that the times of all ranks travel with its steps: without the sum over the ranks.

    python -m benchmarks.rank_times --json benchmarks/records/rank-times.json       seconds

It does what a training adds to each step, and to each in which the ranks tell (of short steps one in a hundred), as
rank 0 of worlds of 2, 64 and 1,024 ranks that all do the same. It gives the lowest of some means, since other
programs only add.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.record import about, show
from hvd_train.progress.clock import PHASES, Split
from hvd_train.progress.slow_ranks import COLUMNS, SlowRanks, Times, spread
from hvd_train.rank_times import OwnTimes, TimesOfRanks
from hvd_train.world.world import Place

RANKS, APART = (2, 64, 1024), 100
AIM = 5.0  # microseconds of a short step on average, on few ranks
REPETITIONS, CALLS = 300, 5  # few at a time: then some of them are not interrupted by other programs


def microseconds(work: Callable[[], object]) -> float:
    """Return the time that `work` takes, the lowest mean of a few calls."""
    means = []
    for _ in range(REPETITIONS):
        started = time.perf_counter()
        for _ in range(CALLS):
            work()
        means.append((time.perf_counter() - started) / CALLS * 1e6)
    return min(means)


def costs(num_ranks: int) -> dict[str, float]:
    """Return what is added to a step, to one in which the ranks tell, and to a short step on average."""
    of_ranks, own, slow_ranks = TimesOfRanks(Place(0, num_ranks), torch.device("cpu")), OwnTimes(Split()), SlowRanks()
    words, num_steps = torch.zeros(20), 0

    def without() -> None:
        torch.cat([words])[:20]

    def in_each_step() -> None:
        own.took(16)
        torch.cat([words, of_ranks.told(())]).split_with_sizes([20, of_ranks.size])

    def told_by_all(row: tuple[float, ...]) -> Times:
        return of_ranks.heard(of_ranks.told(row).view(num_ranks, -1)[:1].expand(num_ranks, -1).contiguous())

    def in_a_step_that_tells() -> None:
        nonlocal num_steps
        num_steps += APART
        for phase in PHASES:
            own.split.mark(phase)
        own.took(16)
        times = told_by_all(own.tell())
        slow_ranks.hear(times, own.heard(times, num_steps))
        json.dumps(spread(times))

    each = microseconds(in_each_step) - microseconds(without)
    telling = microseconds(in_a_step_that_tells)
    found = {"each step": each, "telling": telling, "a short step on average": each + telling / APART}
    return {name: round(value, 1) for name, value in found.items()}


def main() -> None:
    """Measure, print and, if asked to, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="the file that takes the record")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured = {f"{num_ranks} ranks": costs(num_ranks) for num_ranks in RANKS}
    record = {
        **about("benchmarks.rank_times", sys.argv[1:]),
        "steps from one telling to the next": APART,
        "microseconds": measured,
        "bytes that travel": {f"{num_ranks} ranks": 4 * len(COLUMNS) * num_ranks for num_ranks in RANKS},
        "aim": f"at most {AIM:g} microseconds of a step on average, on 2 ranks",
    }
    show(record, options.json)


if __name__ == "__main__":
    main()
