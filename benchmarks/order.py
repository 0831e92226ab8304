"""What the order of a huge epoch costs: 10^9 samples on 1,024 ranks, simulated on one core.

    python -m benchmarks.order --json benchmarks/records/order.json       seconds

Of each of some ranks, spread over all: the processor time to the first step from a cursor anywhere, then that of a
sample over the next 2,000 steps of 32 samples. Memory: what Python and numpy hold at most while all 1,024 stand at a
step.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
import tracemalloc
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.record import about
from hvd_train.progress.order import Assignment, Cut, EpochOrder, assignments

NUM_SAMPLES, RANKS, STEPS = 10**9, 1024, 2000
CUT = Cut(32 * RANKS, 32)
AIMS = {"microseconds_per_sample": 1.0, "resume_milliseconds": 10.0, "megabytes": 64.0}


def times_of(rank: int, cursor: int) -> tuple[float, float]:
    """Milliseconds to the first step from the cursor, and microseconds per sample from there on."""
    begun = time.process_time()
    work = assignments(EpochOrder(0, 0, NUM_SAMPLES), cursor, CUT, rank, RANKS)
    next(work)
    resumed = time.process_time()
    taken = sum(len(slot.indices) for assignment in islice(work, STEPS) for slot in assignment.slots)
    return 1e3 * (resumed - begun), 1e6 * (time.process_time() - resumed) / taken


def megabytes(cursor: int) -> float:
    """Held at most while every rank takes its first step from the cursor."""
    tracemalloc.start()
    ranks = [assignments(EpochOrder(0, 0, NUM_SAMPLES), cursor, CUT, rank, RANKS) for rank in range(RANKS)]
    steps: list[Assignment] = [next(work) for work in ranks]
    assert sum(len(slot.indices) for step in steps for slot in step.slots) == CUT.global_batch
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / 1e6


def main() -> None:
    """Measure, print, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the record goes")
    options = parser.parse_args()
    chance = random.Random(0)
    times_of(0, 0)
    times = [times_of(rank, chance.randrange(NUM_SAMPLES * 9 // 10)) for rank in range(0, RANKS, 32)]
    resume, per_sample = zip(*times, strict=True)
    found = {
        "microseconds_per_sample": [statistics.median(per_sample), max(per_sample)],
        "resume_milliseconds": [statistics.median(resume), max(resume)],
        "megabytes": [megabytes(chance.randrange(NUM_SAMPLES * 9 // 10))] * 2,
    }
    record: dict[str, Any] = about("benchmarks.order", sys.argv[1:])
    for name, (median, most) in found.items():
        verdict = "met" if most < AIMS[name] else "not met"
        record[name] = {
            "median": round(median, 3),
            "most": round(most, 3),
            "aim": f"under {AIMS[name]:g}",
            "verdict": verdict,
        }
    text = json.dumps(record, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
