"""Whether images come as fast from tar shards and from Arrow files as from class folders.

    python -m benchmarks.data_sets      2 minutes on an idle core

The JPEG files are those of `benchmarks.input`: 500 x 375 pixels, quality 90, 105 KB, in class folders, in shards of 32
and in a data set that `datasets` has saved. One process takes all of them in the order of an epoch as training does, in
three ways that take turns, and the fastest turn of each counts: other work on the machine makes turns slower alone. The
kernel has all files in memory by then.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.input import write_folder
from hvd_train import cli
from hvd_train.data import sources
from hvd_train.data.dataset import Source
from hvd_train.data.lent_memory import Task
from hvd_train.data.loader_process import TaskReader
from hvd_train.progress.order import EpochOrder
from hvd_train.settings.data import DataConfig
from tests.support import saved, shards

BATCH = 32


def seconds(source: Source, epoch: int) -> tuple[float, float]:
    """Return the processor time and the time that an image takes in an epoch, read as a loader process reads it."""
    reader, order = TaskReader(source, 0), EpochOrder(0, epoch, len(source))  # type: ignore[arg-type]
    samples = order[0 : len(source)]
    started = time.process_time(), time.perf_counter()
    for begin in range(0, len(samples), BATCH):
        reader[Task([(epoch, int(sample)) for sample in samples[begin : begin + BATCH]], None, None)]
    passed = time.process_time() - started[0], time.perf_counter() - started[1]
    return passed[0] / len(source), passed[1] / len(source)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=256, help="number of JPEG files (default: 256)")
    parser.add_argument("--turns", type=int, default=12, help="turns of each way (default: 12)")
    options = parser.parse_args()
    torch.set_num_threads(1)  # as in a loader process
    with tempfile.TemporaryDirectory(prefix="data-sets-") as place:
        folder = write_folder(Path(place) / "folder", options.images, 90)
        tars = shards.of_folder(folder, Path(place) / "shards", per_shard=32)
        cli.run(["index", str(tars)])
        arrow = saved.of_folder(folder, Path(place) / "saved", {"train": "train"})
        kinds = {"folder": folder, "webdataset": tars, "hf": arrow}
        opened = {kind: sources.open_data(DataConfig(data=kind, data_dir=root), 0) for kind, root in kinds.items()}
        best = dict.fromkeys(kinds, (float("inf"), float("inf")))
        for turn in range(options.turns):
            for kind, data in opened.items():
                best[kind] = tuple(map(min, best[kind], seconds(data.train, turn)))  # type: ignore[assignment]
        for kind, (busy, passed) in best.items():
            of_folder = tuple(usual / here for usual, here in zip(best["folder"], (busy, passed), strict=True))
            print(
                f"{kind:<12}{busy * 1e6:>8,.0f} us of processor time an image, {passed * 1e6:>8,.0f} us in all; "
                f"images/s over those of a folder: {of_folder[0]:.3f} and {of_folder[1]:.3f}"
            )


if __name__ == "__main__":
    main()
