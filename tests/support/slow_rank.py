"""A training of which one rank sleeps in every step: python -m tests.support.slow_rank WHERE RANK SLOW_STEPS STEPS.

WHERE is `forward`, `data` or `optimizer`. The process sleeps that has RANK when it takes its first step. What is a
matter of ten seconds takes three here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Dataset

import hvd_train
from hvd_train.own_loop import Session
from hvd_train.progress import slow_ranks
from hvd_train.step import Step

QUIET_S, SLOW_S = 0.02, 0.06
BATCH = 6


class Rows(Dataset[Tensor]):
    """Rows, of which those of a process sleep beside every step of its own while it is slow."""

    sleep_s = 0.0

    def __len__(self) -> int:
        return int(sys.argv[4]) * BATCH

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.sleep_s)
        return torch.full((4,), index / len(self))


def steps(session: Session, slow_steps: int) -> Iterator[tuple[Step, bool]]:
    """Yield each step, and whether it is to be slow on this rank."""
    mine: bool | None = None
    for step in session:
        if mine is None:
            mine = session.place.rank == int(sys.argv[2])
        yield step, mine and step.number <= slow_steps


def main() -> None:
    """Train."""
    slow_ranks.STRETCH_S = 1.0
    where, rows = sys.argv[1], Rows()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    in_update = 0.0
    optimizer.register_step_pre_hook(lambda *_: time.sleep(in_update))
    settings = {"global_batch_size": BATCH, "batch_size": 1, "epochs": 1, "log_steps": 2, "workers": 0}
    with hvd_train.session(model, optimizer, rows, output_dir="run", device="cpu", **settings) as session:
        for step, is_slow in steps(session, int(sys.argv[3])):
            more = SLOW_S if is_slow else 0.0
            in_update = more if where == "optimizer" else 0.0
            rows.sleep_s = more / 2 if where == "data" else 0.0  # of three ranks each has two samples in a step
            with step:
                time.sleep(QUIET_S + (more if where == "forward" else 0.0))
                for slot in step:
                    slot.backward(model(slot.data).square().squeeze(1))
                step.finish()


if __name__ == "__main__":
    main()
