"""How many images a training takes in a second, and where the time of its steps goes: the real step, nothing written.

What a training does between its steps (metrics, commits, evaluations) is left out.
"""

from __future__ import annotations

import time
from typing import Any

from hvd_train.bench import feed
from hvd_train.bench.record import estimate, written
from hvd_train.config import Config
from hvd_train.data.batches import Ahead
from hvd_train.errors import UsageError
from hvd_train.network import freeze, optim
from hvd_train.network.device import split_on, synchronize, uses_channels_last, uses_fp16_wire
from hvd_train.parts import build_step, fresh_state, warm_parts
from hvd_train.progress.clock import PHASES
from hvd_train.step import Votes
from hvd_train.world.world import World, barrier, together

WARM_UP = 5  # steps that pay for allocation, the choice of algorithms and the first exchange of names between ranks
_IMAGE_SIZES = {"digits": 8, "cifar10": 32, "cifar100": 32}
_LEARNING_RATE = 1e-6  # random labels are not to be learnt: with a real one some networks diverge, and skip the update


def without_files(config: Config, *, own_data: bool) -> Config:
    """Without weights from files: the speed is that of any. Without `own_data` on random images, too.

    These live on the device, are of the size of the config's own images, and their epoch does not end.
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


def measure(config: Config, world: World, *, steps: int, repetitions: int) -> dict[str, Any]:
    """Take steps, and say how long they took. All ranks get the same record. Raises UsageError as training does."""
    parts, optimizer = world.prepare(lambda: warm_parts(config, world, None, None))
    state = together(world, lambda: fresh_state(config, world, parts, optimizer))
    if freeze.apply(config.model, state.model, 0):
        world.regroup(state.optimizer)
    split = split_on(parts.device)
    step = build_step(config, world, parts, split)
    batches = Ahead(feed.batches(parts.train_loader, config, state.cut, world.place), split.mark)
    optim.set_learning_rate(state.optimizer, _LEARNING_RATE)

    def take(count: int) -> int:
        """Take so many steps; the images of all ranks in them."""
        images = 0
        for _ in range(count):
            batch = next(batches)
            result = step.take(state, batch, Votes(), want_norm=False, meanwhile=batches.prepare)
            state.count_step(result.totals, skipped=result.skipped)
            images += batch.size
            split.mark("other")
        return images

    try:
        take(WARM_UP)
        skipped_before = state.progress.skipped
        images, seconds, splits = [], [], []
        for _ in range(repetitions):
            barrier(world)
            synchronize(parts.device)
            split.take()
            split.restart()
            started = time.perf_counter()
            images.append(take(steps))
            synchronize(parts.device)
            seconds.append(time.perf_counter() - started)
            splits.append(split.take() or {})
    finally:
        parts.train_loader.close()
    skipped = state.progress.skipped - skipped_before
    if skipped == steps * repetitions:
        raise UsageError("every step was skipped, its loss or gradient is not finite: there is no training to measure")
    slowest = [max(of_ranks) for of_ranks in zip(*world.gather(seconds), strict=True)]
    speed = estimate([count / took for count, took in zip(images, slowest, strict=True)])
    size = world.place.size
    mean_step = sum(slowest) / (steps * repetitions)
    return {
        "images_per_second": round(speed.mean, 3),
        "images_per_second_interval": speed.interval,
        "images_per_second_per_worker": round(speed.mean / size, 3),
        "images_per_second_of_repetitions": [round(n / took, 3) for n, took in zip(images, slowest, strict=True)],
        "seconds_per_step": round(mean_step, 6),
        "split": {phase: round(sum(of[phase] for of in splits) / repetitions, 6) for phase in PHASES},
        "workers": size,
        "device": parts.device.type,
        "controller": world.transport(parts.device),
        "global_batch_size": state.cut.global_batch,
        "batch_size": state.cut.micro_batch,
        "steps": steps,
        "repetitions": repetitions,
        "warm_up_steps": WARM_UP,
        "skipped_steps": skipped,
        "compression": "fp16" if uses_fp16_wire(config, parts.device) else "none",
        "channels_last": uses_channels_last(config, parts.device),
        "parameters": sum(parameter.numel() for parameter in parts.model.parameters()),
        "config": config.as_dict(),
    }


def table(record: dict[str, Any]) -> str:
    """The record for people."""
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
