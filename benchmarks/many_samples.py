"""What 100 million samples in 100,000 tar files cost a rank: time and memory.

    python -m benchmarks.many_samples       half a minute, and 800 MB in the temporary folder

The files are empty; their tables are made up.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import psutil

from hvd_train.data import shard_formats
from hvd_train.data.shards import Shards
from hvd_train.progress.order import BatchLayout, assignments
from hvd_train.progress.shard_order import ShardOrder

SHARDS = 100_000
OF_SHARD = 1_000
LAYOUT = BatchLayout(8192, 32)
STEPS = 100


@contextmanager
def measured(what: str, times: int = 1) -> Iterator[None]:
    """Print how long the block takes, and the memory of this process afterwards."""
    began = time.perf_counter()
    yield
    seconds = (time.perf_counter() - began) / times
    own = psutil.Process().memory_info()
    print(f"{what}: {1000 * seconds:,.2f} ms, {(own.rss - own.shared) / 2**20:,.0f} MB of memory")


def main() -> None:
    """Make a table, open it, and take steps from the middle of an epoch."""
    table = np.arange(OF_SHARD + 1) * 10_000
    samples = SHARDS * OF_SHARD
    with tempfile.TemporaryDirectory() as folder:
        for number in range(SHARDS):
            Path(folder, f"{number:06}.tar").touch()
        with patch.object(shard_formats, "_table_of", lambda *_, **__: (table, 1)):
            Shards(folder, cache=f"{folder}/cache")  # writes the table
            with measured("a start"):
                shards = Shards(folder, cache=f"{folder}/cache")
        with measured("the order of an epoch"):
            order = ShardOrder(shards.shard_starts, 10_000, 0, 1, samples, LAYOUT)
        with measured("a resume in mid epoch"):
            work = assignments(order, samples // 2, LAYOUT, 0, 1)
            next(work)
        with measured("a later step", STEPS):
            for _ in range(STEPS):
                next(work)


if __name__ == "__main__":
    main()
