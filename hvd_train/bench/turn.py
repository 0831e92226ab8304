"""A turn of `hvd-train tune`: a job that times its steps with the settings of Horovod in its environment."""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hvd_train.bench import tune
from hvd_train.config import Config
from hvd_train.parts import build_steps, fresh_state, passes_of, warm_parts
from hvd_train.progress.clock import Split
from hvd_train.progress.order import assignments, choose_cut, order_of
from hvd_train.run import check, connect
from hvd_train.step import Votes
from hvd_train.world.world import World, barrier

_WARM_UP_STEPS = 5
_ASK_EVERY, _MOST_STEPS = 10, 2000  # steps between looks at autotune's log, and after which it counts as endless


def take(config: Config, turn_s: float) -> None:
    """Take a turn of about `turn_s` seconds on this rank; rank 0 prints the result as JSON.

    Raises UsageError where the config, the model or the data cannot be used.
    """
    check(config)
    config = stand_in(config)
    with tempfile.TemporaryDirectory(prefix="hvd-train-tune-") as folder:
        log = Path(folder) / "autotune.csv"
        os.environ[tune.LOG] = str(log)
        world = connect(config)
        try:
            step = Steps(config, world)
            autotune = "HOROVOD_AUTOTUNE" in os.environ
            answer = {"proposal": _proposal(world, step, log)} if autotune else _seconds(world, step, turn_s)
        finally:
            world.close()
    if world.place.rank == 0:
        print(f"{tune.ANSWER} {json.dumps(answer)}", flush=True)


def stand_in(config: Config) -> Config:
    """Return the config without what does not matter to a step: weights, loader processes, compilation, own images.

    Noise of the same size takes the place of images of classes, unless they are the digits, which are small.
    """
    data = config.data
    changes: dict[str, Any] = {"learning_rate": 1e-6, "workers": 0, "workers_per_host": None, "compile": False}
    if data.data != "digits" and config.task.is_of_image_classes:
        size = data.image_size or {"cifar10": 32, "cifar100": 32}.get(data.data, 224)
        changes |= {"data": "synthetic", "augment": "none", "image_size": size, "synthetic_samples": 2**20}
        changes |= {"download": False, "val_crop_size": None, "val_resize_size": None}
    return config.replace(weights=None, **changes)


class Steps:
    """Takes optimizer steps, always with the same batch, so that no loader takes part in them."""

    def __init__(self, config: Config, world: World) -> None:
        parts, optimizer = warm_parts(config, world)
        cut = choose_cut(config.batch, world.place.size, parts.train_loader.num_samples)
        self._state, self._device, place = fresh_state(config, world, parts, optimizer, cut), parts.device, world.place
        self._steps, self._passes = build_steps(config, world, parts, Split()), passes_of(config, parts)
        order = order_of(0, 0, parts.train_loader.num_samples, 1)
        work = assignments(order, 0, self._state.cut, place.rank, place.size)
        batch = next(iter(parts.train_loader.load(0, [next(work)])))
        self._batch = replace(batch, micro_batches=tuple(batch.micro_batches))
        parts.train_loader.close()

    def __call__(self, count: int) -> None:
        """Take `count` steps and wait until the device has finished them."""
        for _ in range(count):
            self._passes.take(self._steps, self._state, self._batch, Votes())
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _seconds(world: World, steps: Steps, turn_s: float) -> dict[str, float]:
    """Return the seconds that a step takes on the slowest rank, as the result of a turn."""

    def timed(count: int) -> float:
        barrier(world)
        started = time.perf_counter()
        steps(count)
        return max(world.gather(time.perf_counter() - started)) / count

    steps(_WARM_UP_STEPS)
    return {"seconds": timed(max(3, round(turn_s / timed(3))))}


def _proposal(world: World, steps: Steps, log: Path) -> dict[str, str] | None:
    """Take steps until autotune has finished and return its proposal, or None where it does not finish."""
    for _ in range(_MOST_STEPS // _ASK_EVERY):
        steps(_ASK_EVERY)
        proposed = world.broadcast(tune.proposal(log) if world.place.rank == 0 else None, 0)
        if proposed is not None:
            return proposed
    return None
