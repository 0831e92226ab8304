"""How many images a second a training takes, and where the time of its steps goes.

The step is the real one, but nothing is written. What a training does between its steps (metrics, commits, evaluations)
is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from hvd_train.bench import feed, utilization
from hvd_train.bench.record import Record, estimate, written
from hvd_train.config import Config
from hvd_train.data import sources
from hvd_train.data.batches import Ahead, MicroBatch
from hvd_train.data.sources import OwnData
from hvd_train.errors import UsageError
from hvd_train.network import freeze, optim
from hvd_train.network.device import (
    autocast,
    check_own_gpus,
    gpu_identity,
    split_on,
    synchronize,
    uses_channels_last,
    wire_format,
)
from hvd_train.network.flops import Operations, operations_of
from hvd_train.network.memory import enough_for_passes
from hvd_train.network.normalization import alone
from hvd_train.network.trial_passes import Trial, pass_once
from hvd_train.parts import Own, build_steps, fresh_state, mixer, passes_of, share_weights, warm_parts
from hvd_train.progress.clock import PHASES
from hvd_train.progress.order import Cut, choose_cut
from hvd_train.step import Votes
from hvd_train.world.world import World, barrier, together

WARM_UP = 5  # steps that pay for allocation, the choice of algorithms and the first exchange of names between ranks
_LOOKS = {"digits": (8, 1, 10), "cifar10": (32, 3, 10), "cifar100": (32, 3, 100)}  # side, channels and classes
_USUAL_LOOK = (224, 3, 1000)
_LEARNING_RATE = 1e-6  # random labels are not to be learnt: with a real one some networks diverge, and skip the update


@dataclass(frozen=True)
class Repetition:
    """Some steps in a row: the images of all ranks in them, this rank's seconds, and seconds per step by phase."""

    images: int
    seconds: float
    split: dict[str, float]


def without_files(config: Config, *, own_data: bool) -> Config:
    """Return the config without weights from a file, since the speed is that of any weights.

    Unless `own_data` is set it trains on random images, too. These live on the device, have the size of the
    config's own images, and their epoch does not end.
    """
    config = config.replace(weights=None)
    if own_data:
        return config
    return config.replace(
        data="synthetic",
        data_dir=None,
        data_columns=(),
        download=False,
        decode="cpu",
        cache="none",
        cache_dir=None,
        augment="standard",
        random_erasing=0.0,
        image_size=config.data.image_size or _LOOKS.get(config.data.data, _USUAL_LOOK)[0],
        val_crop_size=None,
        val_resize_size=None,
        synthetic_samples=2**40,
    )


def images_like(data: str) -> OwnData:
    """Return what makes the random images of `without_files` for a data set of this name.

    They have its channels and its number of classes, so that the network has the layers of the recipe; those of class
    folders and of a user's own data, which are not looked into, are taken for ImageNet's.
    """
    _, channels, num_classes = _LOOKS.get(data, _USUAL_LOOK)
    return lambda config: sources.synthetic(config, 0, channels=channels, num_classes=num_classes)


def measure(
    config: Config,
    world: World,
    *,
    steps: int,
    repetitions: int,
    images: OwnData | None = None,
    peak_tflops: float | None = None,
) -> Record:
    """Take steps, time them and return the record, which all ranks get; `images` takes the place of the config's data.

    `peak_tflops` is that of the device, where the user tells it. Raises UsageError where every step is skipped, and
    what training raises where it cannot start.
    """
    training = Training(config, world, images)
    try:
        work = utilization.work_of(training, world)
        training.take(WARM_UP)
        measured, skipped = training.repeated(steps, repetitions)
    finally:
        training.close()
    found = speeds(world, measured, steps)
    ideal = utilization.ideal(work, training.device, config.precision.precision, peak_tflops)
    return {
        **found,
        **ideal,
        **utilization.reached(ideal, found["images_per_second_per_worker"]),
        **training.facts(),
        "steps": steps,
        "repetitions": repetitions,
        "warm_up_steps": WARM_UP,
        "skipped_steps": skipped,
        "config": config.as_dict(),
    }


class Training:
    """A training without files, epochs and evaluations: it takes steps, as many as it is asked for."""

    def __init__(self, config: Config, world: World, images: OwnData | None = None) -> None:
        """Raises UsageError where the model or the data cannot be had; `images` is as in `measure`."""
        parts, optimizer = world.prepare(lambda: warm_parts(config, world, Own(data=images)))
        check_own_gpus(world.gather(gpu_identity(parts.device)))
        size, num_samples = world.place.size, parts.train_loader.num_samples
        cut = together(world, lambda: choose_cut(config.batch, size, num_samples))
        self.state = together(world, lambda: fresh_state(config, world, parts, optimizer, cut))
        if freeze.apply(config.model, self.state.model, 0):
            world.regroup(self.state.optimizer)
        share_weights(config, world, self.state)
        self._config, self._world, self._parts = config, world, parts
        self._split = split_on(parts.device)
        self._steps, self._passes = build_steps(config, world, parts, self._split), passes_of(config, parts)
        self._mix = mixer(config.data, len(parts.data.classes))
        self.device, self.num_samples = parts.device, num_samples
        self.cut_into(self.state.cut)
        optim.set_learning_rate(self.state.optimizer, _LEARNING_RATE)

    def cut_into(self, cut: Cut) -> None:
        """Have the steps from the next one on take so many samples, in passes of so many."""
        self.state.cut = cut
        for parameter in self._parts.model.parameters():
            parameter.grad = None  # as at the beginning of a step: it takes memory
        batches = feed.batches(self._parts.train_loader, self._config, cut, self._world.place)
        self._batches = Ahead(batches, self._split.mark)

    def take(self, steps: int) -> int:
        """Take so many steps and return the images of all ranks in them. A GPU may still be at work afterwards."""
        images = 0
        with self._enough():
            for _ in range(steps):
                batch = next(self._batches)
                result = self._passes.take(self._steps, self.state, batch, Votes(), meanwhile=self._batches.prepare)
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

    def repeated(self, steps: int, repetitions: int) -> tuple[list[Repetition], int]:
        """Take so many steps so often, and return the repetitions, and how many of their steps were skipped.

        Raises UsageError where that were all of them.
        """
        before = self.state.progress.skipped
        measured = [self.timed(steps) for _ in range(repetitions)]
        skipped = self.state.progress.skipped - before
        if skipped == steps * repetitions:
            raise UsageError(
                "every step was skipped, its loss or gradient is not finite: there is no training to measure"
            )
        return measured, skipped

    def pass_alone(self) -> None:
        """Pass the samples of a pass through the model, forward and backward, without the other ranks.

        It takes the memory that a step takes beside what steps of any size hold. Raises OutOfMemory.
        """
        with self._enough(), alone(self._parts.model):
            for micro in self._next_passes():
                pass_once(self._trial(micro))

    def operations(self) -> tuple[Operations, int] | None:
        """Return the operations of this rank's first pass in the next step, and the samples in it.

        None where the rank has no pass in that step. Raises what the model raises.
        """
        with alone(self._parts.model):
            for micro in self._next_passes():
                return operations_of(self._trial(micro)), len(micro.samples)
        return None

    def _next_passes(self) -> Iterable[MicroBatch]:
        return next(self._batches).micro_batches

    def _trial(self, micro: MicroBatch) -> Trial:
        task, (inputs, targets) = self._parts.meter.task, self._mix(micro.inputs, micro.targets)
        arithmetic = autocast(self._config.precision.precision, self.device)
        return Trial(self._parts.model, task.forward, task.loss, inputs, targets, arithmetic)

    def _enough(self) -> AbstractContextManager[None]:
        return enough_for_passes(self._config.batch, self.state.cut, self.device)

    def facts(self) -> Record:
        """Return on what and how this training runs."""
        device, cut = self._parts.device, self.state.cut
        return {
            "workers": self._world.place.size,
            "device": device.type,
            "controller": self._world.transport(device),
            "global_batch_size": cut.global_batch,
            "batch_size": cut.micro_batch,
            "compression": wire_format(self._config, device),
            "channels_last": uses_channels_last(self._config, device),
            "unit": self._parts.unit,
            "classes": len(self._parts.data.classes),
            "parameters": sum(parameter.numel() for parameter in self._parts.model.parameters()),
        }

    def close(self) -> None:
        """End the loader processes."""
        self._parts.train_loader.close()


def speeds(world: World, measured: Sequence[Repetition], steps: int) -> Record:
    """Return the numbers of the record: images per second by the slowest rank, and this rank's split of a step."""
    seconds = world.gather([repetition.seconds for repetition in measured])
    slowest = [max(of_ranks) for of_ranks in zip(*seconds, strict=True)]
    rates = [repetition.images / longest for repetition, longest in zip(measured, slowest, strict=True)]
    speed = estimate(rates)
    splits = [repetition.split for repetition in measured]
    return {
        "images_per_second": round(speed.mean, 3),
        "images_per_second_interval": speed.interval,
        "images_per_second_per_worker": round(speed.mean / world.place.size, 3),
        "images_per_second_of_repetitions": [round(rate, 3) for rate in rates],
        "seconds_per_step": round(sum(slowest) / (steps * len(measured)), 6),
        "split": {phase: round(sum(split[phase] for split in splits) / len(splits), 6) for phase in PHASES},
    }


def table(record: Record) -> str:
    """Write the record as a table for people."""
    settings, interval = record["config"], record["images_per_second_interval"]
    spread = "" if interval is None else f" (95%: {interval[0]:,.1f} to {interval[1]:,.1f})"
    data, size = settings["data"]["data"], settings["data"]["image_size"]
    step, unit = record["seconds_per_step"], record["unit"]
    classes = f", {record['classes']:,} classes" if record["classes"] else ""
    lines = [
        f"{settings['model']['model']} ({record['parameters'] / 1e6:.2f} M parameters) on {data}"
        f"{f' images of {size} pixels' if size else ''}{classes}, "
        f"{settings['precision']['precision']}, compression {record['compression']}",
        f"{record['workers']} x {record['device']} "
        f"({record['controller']}), {record['global_batch_size']} {unit} a step in slots of {record['batch_size']}",
        f"{f'{unit}/s':<17}{record['images_per_second']:,.1f}{spread}",
        f"a worker         {record['images_per_second_per_worker']:,.1f}",
        f"ms a step        {written(1000 * step)}",
        *(
            f"  {phase:<12} {1000 * seconds:>10,.3f}  {seconds / step:6.1%}"
            for phase, seconds in record["split"].items()
            if seconds  # nothing is committed here
        ),
    ]
    lines.append(f"FLOPs            {utilization.told(record, record['unit'])}")
    if record["skipped_steps"]:
        lines.append(f"{record['skipped_steps']} steps were skipped: their loss or gradient was not finite")
    return "\n".join(lines)
