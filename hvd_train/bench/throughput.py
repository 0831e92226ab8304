"""How many images a second a training takes, and where the time of its steps goes.

The step is the real one, but nothing is written. What a training does between its steps (metrics, commits, evaluations)
is left out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_train.bench import feed
from hvd_train.bench.record import Record, estimate, written
from hvd_train.config import Config
from hvd_train.data.batches import Ahead
from hvd_train.errors import UsageError
from hvd_train.network import freeze, optim
from hvd_train.network.device import split_on, synchronize, uses_channels_last, uses_fp16_wire
from hvd_train.parts import build_step, fresh_state, warm_parts
from hvd_train.progress.clock import PHASES
from hvd_train.progress.order import choose_cut
from hvd_train.step import Votes
from hvd_train.world.world import World, barrier, together

WARM_UP = 5  # steps that pay for allocation, the choice of algorithms and the first exchange of names between ranks
_IMAGE_SIZES = {"digits": 8, "cifar10": 32, "cifar100": 32}
_LEARNING_RATE = 1e-6  # random labels are not to be learnt: with a real one some networks diverge, and skip the update


@dataclass(frozen=True)
class Repetition:
    """Some steps in a row: the images of all ranks in them, this rank's seconds, and seconds per step by phase."""

    images: int
    seconds: float
    split: dict[str, float]


def without_files(config: Config, *, own_data: bool) -> Config:
    """Return the config without weights from a file, since the speed is that of any weights.

    Unless `own_data` is set it trains on random images, too. These live on the device, have the size of the config's
    own images, and their epoch does not end.
    """
    config = config.replace(weights=None)
    if own_data:
        return config
    return config.replace(
        data="synthetic",
        data_dir=None,
        download=False,
        augment="standard",
        random_erasing=0.0,
        image_size=config.data.image_size or _IMAGE_SIZES.get(config.data.data, 224),
        val_crop_size=None,
        val_resize_size=None,
        synthetic_samples=2**40,
    )


def measure(config: Config, world: World, *, steps: int, repetitions: int) -> Record:
    """Take steps, time them and return the record, which all ranks get.

    Raises UsageError where every step is skipped, and what training raises where it cannot start.
    """
    training = Training(config, world)
    try:
        training.take(WARM_UP)
        skipped_before = training.state.progress.skipped
        measured = [training.timed(steps) for _ in range(repetitions)]
    finally:
        training.close()
    skipped = training.state.progress.skipped - skipped_before
    if skipped == steps * repetitions:
        raise UsageError("every step was skipped, its loss or gradient is not finite: there is no training to measure")
    return {
        **_speeds(world, measured, steps),
        **training.facts(),
        "steps": steps,
        "repetitions": repetitions,
        "warm_up_steps": WARM_UP,
        "skipped_steps": skipped,
        "config": config.as_dict(),
    }


class Training:
    """A training without files, epochs and evaluations: it takes steps, as many as it is asked for."""

    def __init__(self, config: Config, world: World) -> None:
        """Raises UsageError where the model or the data cannot be had."""
        parts, optimizer = world.prepare(lambda: warm_parts(config, world, None, None))
        size, num_samples = world.place.size, parts.train_loader.num_samples
        cut = together(world, lambda: choose_cut(config.batch, size, num_samples))
        self.state = together(world, lambda: fresh_state(config, world, parts, optimizer, cut))
        if freeze.apply(config.model, self.state.model, 0):
            world.regroup(self.state.optimizer)
        self._config, self._world, self._parts = config, world, parts
        self._split = split_on(parts.device)
        self._step = build_step(config, world, parts, self._split)
        batches = feed.batches(parts.train_loader, config, self.state.cut, world.place)
        self._batches = Ahead(batches, self._split.mark)
        optim.set_learning_rate(self.state.optimizer, _LEARNING_RATE)

    def take(self, steps: int) -> int:
        """Take so many steps and return the images of all ranks in them. A GPU may still be at work afterwards."""
        images = 0
        for _ in range(steps):
            batch = next(self._batches)
            result = self._step.take(self.state, batch, Votes(), want_norm=False, meanwhile=self._batches.prepare)
            self.state.count_step(result.totals, skipped=result.skipped)
            images += batch.size
            self._split.mark("other")
        return images

    def timed(self, steps: int) -> Repetition:
        """Take so many steps, which all ranks begin together, to their end on the device, and time them."""
        barrier(self._world)
        synchronize(self._parts.device)
        self._split.take()
        self._split.restart()
        started = time.perf_counter()
        images = self.take(steps)
        synchronize(self._parts.device)
        seconds = time.perf_counter() - started
        return Repetition(images, seconds, self._split.take() or {})

    def facts(self) -> Record:
        """Return on what and how this training runs."""
        device, cut = self._parts.device, self.state.cut
        return {
            "workers": self._world.place.size,
            "device": device.type,
            "controller": self._world.transport(device),
            "global_batch_size": cut.global_batch,
            "batch_size": cut.micro_batch,
            "compression": "fp16" if uses_fp16_wire(self._config, device) else "none",
            "channels_last": uses_channels_last(self._config, device),
            "parameters": sum(parameter.numel() for parameter in self._parts.model.parameters()),
        }

    def close(self) -> None:
        """End the loader processes."""
        self._parts.train_loader.close()


def _speeds(world: World, measured: Sequence[Repetition], steps: int) -> Record:
    """Return the numbers of the record: images per second by the slowest rank, and this rank's split of a step."""
    seconds = world.gather([repetition.seconds for repetition in measured])
    slowest = [max(of_ranks) for of_ranks in zip(*seconds, strict=True)]
    speeds = [repetition.images / longest for repetition, longest in zip(measured, slowest, strict=True)]
    speed = estimate(speeds)
    splits = [repetition.split for repetition in measured]
    return {
        "images_per_second": round(speed.mean, 3),
        "images_per_second_interval": speed.interval,
        "images_per_second_per_worker": round(speed.mean / world.place.size, 3),
        "images_per_second_of_repetitions": [round(images_per_second, 3) for images_per_second in speeds],
        "seconds_per_step": round(sum(slowest) / (steps * len(measured)), 6),
        "split": {phase: round(sum(split[phase] for split in splits) / len(splits), 6) for phase in PHASES},
    }


def table(record: Record) -> str:
    """Write the record as a table for people."""
    settings, interval = record["config"], record["images_per_second_interval"]
    spread = "" if interval is None else f" (95%: {interval[0]:,.1f} to {interval[1]:,.1f})"
    data, size = settings["data"]["data"], settings["data"]["image_size"]
    step = record["seconds_per_step"]
    lines = [
        f"{settings['model']['model']} ({record['parameters'] / 1e6:.2f} M parameters) on {data}"
        f"{f' images of {size} pixels' if size else ''}, "
        f"{settings['precision']['precision']}, compression {record['compression']}",
        f"{record['workers']} x {record['device']} "
        f"({record['controller']}), {record['global_batch_size']} images a step in slots of {record['batch_size']}",
        f"images/s         {record['images_per_second']:,.1f}{spread}",
        f"a worker         {record['images_per_second_per_worker']:,.1f}",
        f"ms a step        {written(1000 * step)}",
        *(
            f"  {phase:<12} {1000 * seconds:>10,.3f}  {seconds / step:6.1%}"
            for phase, seconds in record["split"].items()
        ),
    ]
    if record["skipped_steps"]:
        lines.append(f"{record['skipped_steps']} steps were skipped: their loss or gradient was not finite")
    return "\n".join(lines)
