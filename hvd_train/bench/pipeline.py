"""Measure the input pipeline as in training, then each stage on one core."""

import time
from collections.abc import Iterator
from contextlib import closing

import torch

from hvd_train.bench import record
from hvd_train.bench.record import Measurement, written_speed
from hvd_train.bench.throughput import batches, repeat
from hvd_train.config import Config
from hvd_train.data.dataset import Arrays
from hvd_train.data.loader import Batch
from hvd_train.network.device import num_cores, synchronize
from hvd_train.parts import Parts, build, loader_processes
from hvd_train.world.world import Place, World, together

WARM_UP_S = 1.0
IN_TRAINING_PROCESS = ("transfer", "prepare")  # stages of whole batches; the others run in loader processes
_COLUMNS = (
    *(("stage", "stage", ""), ("microseconds_per_image", "us per image", "")),
    *(("samples_per_second_per_core", "images/s a core", ",.0f"), ("limits", "", "")),
)


def measure(config: Config, world: World, *, seconds: float, repetitions: int) -> Measurement:
    """Run the input `repetitions` times for `seconds` and return the record on all ranks. Raises UsageError."""
    place = world.place
    parts = together(world, lambda: build(config, place))
    speed = record.speed(_speeds(parts, config, world, seconds, repetitions), place.size)
    alone = together(world, lambda: build(config.replace(workers=0, workers_per_host=None), place))
    stages = _stages(alone, config, seconds)
    workers = 0 if isinstance(parts.data.train, Arrays) else loader_processes(config.data, place)
    speed["samples_per_second_per_process"] = round(speed["samples_per_second_per_worker"] / max(1, workers), 3)
    about = {"cores_per_worker": num_cores(place), "workers": place.size, "device": parts.device.type}
    about |= {"repetitions": repetitions, "seconds": seconds, "config": config.as_dict()}
    rows = [
        {"stage": stage, "microseconds_per_image": 1e6 * spent, "samples_per_second_per_core": 1 / spent}
        for stage, spent in stages.items()
    ]
    found = {"limited_by": limiting(stages, workers, num_cores(place)), "stages": rows}
    return {**speed, "loader_processes_per_worker": workers, **found, **about}


def limiting(stages: dict[str, float], workers: int, num_cores: int) -> str:
    """Return the slowest stage, by seconds per image, of the slower side: loader processes or training process."""
    in_training = {stage: spent for stage, spent in stages.items() if stage in IN_TRAINING_PROCESS}
    in_loaders = {stage: spent for stage, spent in stages.items() if stage not in IN_TRAINING_PROCESS}
    if at_once := min(workers, num_cores):
        stages = in_training if sum(in_training.values()) > sum(in_loaders.values()) / at_once else in_loaders
    return max(stages, key=lambda stage: stages[stage])


def table(measured: Measurement) -> str:
    """Write the record as a table."""
    processes = measured["loader_processes_per_worker"]
    made_by = f"{processes} loader processes a rank" if processes else "the training process"
    limit = measured["limited_by"]
    rows = [{**row, "limits": "<- limits" if row["stage"] == limit else " "} for row in measured["stages"]]
    return (
        f"images/s        {written_speed(measured)}\n"
        f"a process       {measured['samples_per_second_per_process']:,.0f}\n"
        f"made by         {made_by}, on {measured['cores_per_worker']} cores\n\n{record.table(_COLUMNS, rows)}"
    )


def _speeds(parts: Parts, config: Config, world: World, seconds: float, repetitions: int) -> list[float]:
    with closing(parts.train_loader) as loader:
        loader.start()
        source = batches(loader, config, world.place)
        _take(source, WARM_UP_S)
        images, passed = repeat(world, parts.device, lambda: _take(source, seconds), repetitions)
        return [sum(n) / longest for *n, longest in zip(*world.gather(images), passed, strict=True)]


def _stages(parts: Parts, config: Config, seconds: float) -> dict[str, float]:
    """Return the seconds per image at each stage, on one core or the device."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a loader process
    spent, last = dict[str, float](), 0.0

    def mark(stage: str) -> None:
        nonlocal last
        synchronize(parts.device)
        now = time.perf_counter()
        spent[stage] = spent.get(stage, 0.0) + now - last
        last = now

    try:
        parts.train_loader.watch(mark)
        source = batches(parts.train_loader, config, Place())  # of all samples: a rank may have none in a small batch
        _take(source, WARM_UP_S / 2)
        spent.clear()
        last = time.perf_counter()
        images = _take(source, seconds)
    finally:
        torch.set_num_threads(threads)
        parts.train_loader.close()
    return {stage: total / images for stage, total in spent.items()}


def _take(source: Iterator[Batch], seconds: float) -> int:
    images, end = 0, time.perf_counter() + seconds
    while True:
        images += sum(len(micro.samples) for micro in next(source).micro_batches)
        if time.perf_counter() >= end:
            return images
