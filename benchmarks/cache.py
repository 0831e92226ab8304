"""What a cache of reduced images costs and gives: microseconds of processor time that an image takes.

    python -m benchmarks.cache      1 minute on an idle core

The JPEG files are those of `benchmarks.input`: 500 x 375 pixels, quality 90, 105 KB. One process reads them in three
ways that take turns: without a cache, into an empty one, and from a full one. The folder is a temporary one, and the
kernel has the files in memory by then.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.input import write_folder
from hvd_train.data.folder import open_folder
from hvd_train.settings.data import DataConfig


def microseconds(config: DataConfig, split: str) -> float:
    """Return the processor time that an image of this split takes, from a data set that is opened anew."""
    source = getattr(open_folder(Path(config.data_dir or ""), config), split)
    start = time.process_time()
    for index in range(len(source)):
        source[index]
    return (time.process_time() - start) / len(source) * 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=128, help="number of JPEG files (default: 128)")
    parser.add_argument("--turns", type=int, default=9, help="turns of each way (default: 9)")
    options = parser.parse_args()
    torch.set_num_threads(1)  # as in a loader process
    with tempfile.TemporaryDirectory(prefix="cache-") as folder:
        root, kept = write_folder(Path(folder) / "data", options.images, 90), Path(folder) / "cache"
        without = DataConfig(data="folder", data_dir=root)
        cached = DataConfig(data="folder", data_dir=root, cache="disk", cache_dir=kept)
        for split in ("train", "val"):
            times: dict[str, list[float]] = {"without": [], "into an empty cache": [], "from a full cache": []}
            for _ in range(options.turns):
                shutil.rmtree(kept, ignore_errors=True)
                for taken, config in zip(times.values(), (without, cached, cached), strict=True):
                    taken.append(microseconds(config, split))
            for way, taken in times.items():
                usual = statistics.median(a / b for a, b in zip(times["without"], taken, strict=True))
                print(f"{split:<6}{way:<22}{statistics.median(taken):>8,.0f} us an image, {usual:.2f} as many a second")
        sizes = [path.stat().st_size for path in kept.glob("*/*/??/*")]
        print(f"bytes of an image that is kept: {statistics.mean(sizes):,.0f}")


if __name__ == "__main__":
    main()
