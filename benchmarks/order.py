"""The cost of the order of samples in a huge epoch: 10^9 samples on 1,024 ranks, simulated on one core.

    python -m benchmarks.order --json benchmarks/records/order.json       seconds

It measures, for every 32nd rank, the processor time to the first step from a random cursor, then that of a sample over
the next 2,000 steps of 32 samples; and the most memory that Python and numpy hold while all 1,024 ranks take a step.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
import tracemalloc
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.record import about, show
from hvd_train.progress.order import Assignment, Cut, EpochOrder, assignments

NUM_SAMPLES, RANKS, STEPS = 10**9, 1024, 2000
CUT = Cut(32 * RANKS, 32)
AIMS = {"microseconds_per_sample": 1.0, "resume_milliseconds": 10.0, "megabytes": 64.0}


def times_of(rank: int, cursor: int) -> tuple[float, float]:
    """Return milliseconds to the first step from the cursor, and microseconds per sample from there on."""
    started = time.process_time()
    work = assignments(EpochOrder(0, 0, NUM_SAMPLES), cursor, CUT, rank, RANKS)
    next(work)
    resumed = time.process_time()
    num_samples = sum(len(slot.indices) for assignment in islice(work, STEPS) for slot in assignment.slots)
    return 1e3 * (resumed - started), 1e6 * (time.process_time() - resumed) / num_samples


def megabytes(cursor: int) -> float:
    """Return the most memory held while every rank takes its first step from the cursor, in megabytes."""
    tracemalloc.start()
    ranks = [assignments(EpochOrder(0, 0, NUM_SAMPLES), cursor, CUT, rank, RANKS) for rank in range(RANKS)]
    steps: list[Assignment] = [next(work) for work in ranks]
    assert sum(len(slot.indices) for step in steps for slot in step.slots) == CUT.global_batch
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / 1e6


def main() -> None:
    """Measure, print and, if asked to, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="the file that takes the record")
    options = parser.parse_args()
    generator = random.Random(0)
    times_of(0, 0)
    times = [times_of(rank, generator.randrange(NUM_SAMPLES * 9 // 10)) for rank in range(0, RANKS, 32)]
    resume, per_sample = zip(*times, strict=True)
    measured = {
        "microseconds_per_sample": [statistics.median(per_sample), max(per_sample)],
        "resume_milliseconds": [statistics.median(resume), max(resume)],
        "megabytes": [megabytes(generator.randrange(NUM_SAMPLES * 9 // 10))] * 2,
    }
    record: dict[str, Any] = about("benchmarks.order", sys.argv[1:])
    for name, (median, most) in measured.items():
        verdict = "met" if most < AIMS[name] else "not met"
        record[name] = {
            "median": round(median, 3),
            "most": round(most, 3),
            "aim": f"under {AIMS[name]:g}",
            "verdict": verdict,
        }
    show(record, options.json)


if __name__ == "__main__":
    main()
