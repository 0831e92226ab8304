"""Measure the real optimizer step, without metrics, commits, evaluations and files."""

import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import closing

from hvd_train.bench import record
from hvd_train.bench.record import Measurement
from hvd_train.config import Config
from hvd_train.console import say
from hvd_train.data.loader import Ahead, Loader
from hvd_train.network import freeze, optim
from hvd_train.network.device import (
    arithmetic,
    peak_memory_gib,
    split_on,
    synchronize,
    wire_format,
)
from hvd_train.parts import fresh_state, warm_parts
from hvd_train.progress.clock import PHASES
from hvd_train.progress.order import Batch, EpochOrder, assignments, choose_layout
from hvd_train.recipes import on_random_images
from hvd_train.updater import Updater
from hvd_train.world.world import Place, World, together


def batches(loader: Loader, config: Config, place: Place) -> Iterator[Batch]:
    """Yield this rank's batches in the order of training, epoch after epoch without an end."""
    layout = choose_layout(config.batch, place.size, loader.num_samples)
    for epoch in itertools.count():
        order = EpochOrder(config.seed, epoch, loader.num_samples)
        yield from loader.load(epoch, assignments(order, 0, layout, place.rank, place.size))


# steps that pay for allocation, the choice of algorithms and the first
# exchange of names between ranks
WARM_UP = 5
# with a larger one some networks diverge on random labels and skip the update
_LEARNING_RATE = 1e-6


def without_files(config: Config, *, own_data: bool) -> Config:
    """Return the config without files of weights and, unless
    `own_data`, without files of images.
    """
    config = config.replace(weights=None)
    return config if own_data else on_random_images(config, 2**40)


def measure(config: Config, world: World, *, steps: int, repetitions: int) -> Measurement:
    """Time steps and return the record on all ranks.

    Raises UsageError as a training does when it starts.
    """
    with closing(Stepper(config, world)) as stepper:
        stepper.take(WARM_UP)
        results = []
        own_seconds = []
        for number in range(1, repetitions + 1):
            world.gather(None)  # wait for all ranks
            synchronize(stepper.device)
            started = time.perf_counter()
            results.append(stepper.split_of(steps))
            own_seconds.append(time.perf_counter() - started)
            if world.place.rank == 0:
                speed = results[-1][0] / own_seconds[-1]
                say(f"repetition {number} of {repetitions}: {speed:,.1f} images/s")
        peaks = world.gather(peak_memory_gib(stepper.device))
        seconds = [max(of_ranks) for of_ranks in zip(*world.gather(own_seconds), strict=True)]
    speeds = [images / slowest for (images, _), slowest in zip(results, seconds, strict=True)]
    device = stepper.device
    layout = stepper.state.layout
    return {
        "samples_per_second": round(statistics.fmean(speeds), 3),
        "samples_per_second_of_repetitions": [round(speed, 3) for speed in speeds],
        "seconds_per_step": round(sum(seconds) / (steps * repetitions), 6),
        "split": {
            phase: round(statistics.fmean(split[phase] for _, split in results), 6)
            for phase in PHASES
        },
        "workers": world.place.size,
        "device": device.type,
        "global_batch_size": layout.global_batch,
        "batch_size": layout.micro_batch,
        "steps": steps,
        "repetitions": repetitions,
        "precision": arithmetic(config, device),
        "compression": wire_format(config, device),
        "parameters": sum(parameter.numel() for parameter in stepper.state.model.parameters()),
        "peak_memory_gib": round(max(peaks), 3),
        "skipped_steps": stepper.state.progress.skipped,
        "config": config.as_dict(),
    }


class Stepper:
    """Takes steps of a training without epochs, evaluations and files."""

    def __init__(self, config: Config, world: World) -> None:
        """Raises UsageError if the model or the data cannot be loaded."""
        parts, optimizers = world.prepare(lambda: warm_parts(config, world))
        layout = together(
            world,
            lambda: choose_layout(config.batch, world.place.size, parts.train_loader.num_samples),
        )
        self.state = together(world, lambda: fresh_state(config, world, parts, optimizers, layout))
        freeze.apply(config.model, self.state.model, 0, parts.heads)
        self.device = parts.device
        self.split = split_on(parts.device)
        self.close = parts.train_loader.close
        self._updater = Updater(
            config, world, parts.model, parts.device, parts.training, self.split
        )
        self._batches = Ahead(batches(parts.train_loader, config, world.place), self.split.mark)
        optim.set_learning_rate(self.state.optimizer, _LEARNING_RATE)

    def take(self, steps: int) -> int:
        """Take steps and return the images of all ranks; a GPU may not have finished."""
        images = 0
        for _ in range(steps):
            batch = next(self._batches)
            result = self._updater.take(self.state, batch, self._batches.prepare)
            self.state.count_step(result.totals, skipped=result.skipped)
            images += batch.size
            self.split.mark("other")
        return images

    def repeat_batch(self) -> None:
        """Take all further steps on the next batch, which leaves out the work for others."""
        self._batches = Ahead(itertools.repeat(next(self._batches)), self.split.mark)

    def split_of(self, steps: int) -> tuple[int, dict[str, float]]:
        """Take steps; return all ranks' images and this rank's seconds a step by phase."""
        self.split.take()
        self.split.restart()
        images = self.take(steps)
        synchronize(self.device)
        return images, self.split.take() or {}


def table(measured: Measurement) -> str:
    """Write the record as a table."""
    settings = measured["config"]
    step = measured["seconds_per_step"]
    data = settings["data"]
    size = settings["image_size"]
    speeds = measured["samples_per_second_of_repetitions"]
    split = [
        (phase, f"{1000 * own:,.3f}", f"{own / step:.1%}")
        for phase, own in measured["split"].items()
    ]
    return (
        f"{settings['model']} ({measured['parameters'] / 1e6:.2f} M parameters) on "
        f"{data}{f' images of {size} pixels' if size else ''}, {measured['precision']}, "
        f"compression {measured['compression']}\n"
        f"{measured['workers']} x {measured['device']}, {measured['global_batch_size']} images a "
        f"step in micro-batches of {measured['batch_size']}\n"
        f"images/s         {measured['samples_per_second']:,.1f} ({min(speeds):,.1f} to "
        f"{max(speeds):,.1f})\n"
        f"ms a step        {1000 * step:,.2f}\n"
        f"skipped steps    {measured['skipped_steps']}\n"
        f"{record.table([('phase', 'ms a step', 'share'), *split])}"
    )
