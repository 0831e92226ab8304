"""Measure the input pipeline as in training, without a model."""

import time
from collections.abc import Iterator
from contextlib import closing

from hvd_train.bench import record
from hvd_train.bench.record import Measurement, written_speed
from hvd_train.bench.throughput import batches, repeat
from hvd_train.config import Config
from hvd_train.data.dataset import Arrays
from hvd_train.data.loader import Batch
from hvd_train.network.device import num_cores
from hvd_train.parts import Parts, build, loader_processes
from hvd_train.world.world import World, together

WARM_UP_S = 1.0


def measure(config: Config, world: World, *, seconds: float, repetitions: int) -> Measurement:
    """Run the input `repetitions` times for `seconds` and return the record on all ranks. Raises UsageError."""
    place = world.place
    parts = together(world, lambda: build(config, place))
    speed = record.speed(_speeds(parts, config, world, seconds, repetitions), place.size)
    workers = 0 if isinstance(parts.data.train, Arrays) else loader_processes(config.data, place)
    speed["samples_per_second_per_process"] = round(speed["samples_per_second_per_worker"] / max(1, workers), 3)
    about = {"cores_per_worker": num_cores(place), "workers": place.size, "device": parts.device.type}
    about |= {"repetitions": repetitions, "seconds": seconds, "config": config.as_dict()}
    return {**speed, "loader_processes_per_worker": workers, **about}


def table(measured: Measurement) -> str:
    """Write the record as a table."""
    processes = measured["loader_processes_per_worker"]
    made_by = f"{processes} loader processes a rank" if processes else "the training process"
    return (
        f"images/s        {written_speed(measured)}\n"
        f"a process       {measured['samples_per_second_per_process']:,.0f}\n"
        f"made by         {made_by}, on {measured['cores_per_worker']} cores"
    )


def _speeds(parts: Parts, config: Config, world: World, seconds: float, repetitions: int) -> list[float]:
    with closing(parts.train_loader) as loader:
        loader.start()
        source = batches(loader, config, world.place)
        _take(source, WARM_UP_S)
        images, passed = repeat(world, parts.device, lambda: _take(source, seconds), repetitions)
        return [sum(n) / longest for *n, longest in zip(*world.gather(images), passed, strict=True)]


def _take(source: Iterator[Batch], seconds: float) -> int:
    images, end = 0, time.perf_counter() + seconds
    while True:
        images += sum(len(micro.samples) for micro in next(source).micro_batches)
        if time.perf_counter() >= end:
            return images
