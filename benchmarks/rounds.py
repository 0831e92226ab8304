"""What ranks say to one another in a step: rounds of the coordinator, writes to sockets, and the time of small sums.

    python -m benchmarks.rounds --json benchmarks/records/rounds.json       two minutes on 2 cores

As many tensors as ResNet-50 has travel, each of 16 numbers, so that what is counted is the agreement on them: one by
one, as Horovod's optimizer hands them over, and as one group, as ours does. A round is a cycle of Horovod's background
thread in which rank 0 hears from all; its timeline marks them. Writes are those of one rank where nothing goes through
shared memory, as between hosts. With many more ranks than cores they take turns: the milliseconds say how that grows,
not what a cluster takes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.meeting import answers_of
from benchmarks.record import about, show

RANKS, TENSORS, STEPS, WARM_UP = (2, 4, 8, 16, 32), 161, 20, 5


def rank(environ: Mapping[str, str], pipe: Connection) -> None:
    """Be a rank: send what a step takes by each way."""
    import horovod.torch as hvd
    import torch

    os.environ.update(environ)
    torch.set_num_threads(1)
    hvd.init()
    tensors = [torch.ones(16) for _ in range(TENSORS)]

    def one_by_one() -> None:
        handles = [hvd.allreduce_async_(t, name=f"tensor {n}", op=hvd.Sum) for n, t in enumerate(tensors)]
        for handle in handles:
            hvd.synchronize(handle)

    def as_a_group() -> None:
        hvd.synchronize(hvd.grouped_allreduce_async_(tensors, name="group", op=hvd.Sum))

    def one_sum() -> None:
        hvd.allreduce_(tensors[0], name="one", op=hvd.Sum)

    ways = {f"{TENSORS} tensors": one_by_one, "one group of them": as_a_group, "one tensor": one_sum}
    pipe.send({name: of_a_step(step, hvd) for name, step in ways.items()})
    pipe.recv()
    hvd.shutdown()
    os._exit(0)


def of_a_step(step: Callable[[], None], hvd: Any) -> dict[str, float]:
    """Return the rounds, the writes and the milliseconds of a step."""
    for _ in range(WARM_UP):  # from the second on, ranks name tensors by their places in a cache
        step()
    writes, begun = _writes(), time.perf_counter()
    for _ in range(STEPS):
        step()
    found = {"writes": (_writes() - writes) / STEPS, "milliseconds": 1000 * (time.perf_counter() - begun) / STEPS}
    if hvd.rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            timeline = Path(folder) / "timeline.json"
            hvd.start_timeline(str(timeline), mark_cycles=True)
            for _ in range(STEPS):
                step()
            hvd.stop_timeline()
            found["rounds"] = timeline.read_text().count("CYCLE_START") / STEPS
    else:
        for _ in range(STEPS):
            step()
    return found


def _writes() -> int:
    """Return how often this process has written so far."""
    return int(Path("/proc/self/io").read_text().split("syscw: ")[1].split()[0])


def counted(size: int) -> dict[str, Any]:
    """Return what steps of so many ranks take, by way."""
    here, _ = answers_of(size, rank, HOROVOD_TIMELINE="DYNAMIC")
    apart, _ = answers_of(size, rank, HOROVOD_TIMELINE="DYNAMIC", HVD_TRAIN_SHARED_MEMORY="0")
    return {
        way: {
            "rounds": round(here[0][way]["rounds"], 1),
            "milliseconds": round(statistics.median(answer[way]["milliseconds"] for answer in here), 2),
            "writes of rank 0": round(apart[0][way]["writes"]),
            "writes of another rank": round(statistics.median(answer[way]["writes"] for answer in apart[1:])),
        }
        for way in here[0]
    }


def main() -> None:
    """Count, print and, if asked to, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    parser.add_argument("--json", type=Path, help="the file that takes the record")
    options = parser.parse_args()
    import horovod.torch  # noqa: F401  # before the ranks are forked

    found = {f"{size} ranks": counted(size) for size in options.ranks}
    show({**about("benchmarks.rounds", sys.argv[1:]), **found}, options.json)


if __name__ == "__main__":
    main()
