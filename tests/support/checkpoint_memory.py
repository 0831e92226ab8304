"""`python -m tests.support.checkpoint_memory MB FOLDER WAY ...`: how much memory a checkpoint takes beside the state.

A way is `write` (the last commit of a training, with the best and the final weights), `check`, `read` (resume) or
`weights` (what `evaluate` and `export` read). `write` comes first: the others read what it has written. The state is of
weights and of Adam's moments, in tensors of 1 MB. Numbers of bytes are printed: the state, the largest tensor, and for
each way the most memory that this process held, less what it held before. What one way leaves, a later one uses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from hvd_train import checkpoint
from hvd_train.checkpoint import DiskStore, newest_good, path_of
from hvd_train.config import Config
from hvd_train.progress.order import Cut
from hvd_train.run import read_target
from hvd_train.state import TrainState
from tests.support.bombs import peak_growth

SIDE = 512


def state_of(megabytes: int, *, used: bool) -> TrainState:
    """Return a state whose weights, and moments if the optimizer is `used`, take this much."""
    model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(megabytes // 3)))
    optimizer = torch.optim.Adam(model.parameters())
    if used:
        for weight in model.parameters():  # a step would leave room that its gradients had
            moments = {name: torch.ones_like(weight) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[weight] = {"step": torch.ones(()), **moments}
    return TrainState(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), Cut(1, 1))


def main(megabytes: int, folder: Path, names: list[str]) -> None:
    """Go these ways and print the numbers."""
    state = state_of(megabytes, used="write" in names)
    path = path_of(folder, 0)

    def write() -> None:
        disk = DiskStore(folder, 1, Config().as_dict(), print)
        disk.save_weights(checkpoint.BEST, state)
        assert disk.commit_last(state, final_weights=True).result()
        disk.close()

    def resume() -> None:
        snapshot = newest_good(folder, print)
        assert snapshot is not None
        state.load(snapshot)

    ways: dict[str, Callable[[], object]] = {
        "write": write,
        "read": resume,
        "check": lambda: checkpoint.check(path),
        "weights": lambda: read_target(path),
    }
    largest = SIDE * SIDE * 4
    print((megabytes // 3) * 3 * largest, largest, *(peak_growth(ways[name]) for name in names))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
