"""A job that takes steps with programs of `benchmarks.bare`, and writes each rank's weights: `-m` with their names."""

from __future__ import annotations

import os
import sys

import torch

from benchmarks import bare, networks

STEPS, IMAGE_SIZE, BATCH = 4, 8, 30


def main(names: list[str]) -> None:
    """Take `STEPS` steps with each of the programs, all from the same weights."""
    rank = os.environ.get("HOROVOD_RANK", os.environ.get("RANK"))
    for name in names:
        torch.manual_seed(0)
        network = networks.convnet(10)
        if name in bare.WITH_BUCKETS:
            steps = bare.WITH_BUCKETS[name](network, IMAGE_SIZE, BATCH, 1)
        else:
            steps = bare.OTHERS[name](network, IMAGE_SIZE, BATCH)
        for _ in range(STEPS):
            next(steps)
        torch.save(network.state_dict(), f"{name}-{rank}.pt")
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
