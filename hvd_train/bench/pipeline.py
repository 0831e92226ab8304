"""How many images a second the input gives without a model, and which stage on their way limits it.

There are two measurements: the whole pipeline as training has it, with its loader processes; and each stage by itself,
by the same code in one process on one core, which marks the end of each stage.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from hvd_train.bench import feed, readers
from hvd_train.bench.record import Record, estimate, written
from hvd_train.config import Config
from hvd_train.data.batches import Batch
from hvd_train.data.dataset import Arrays
from hvd_train.network.device import num_cores, synchronize
from hvd_train.parts import Parts, build, loader_processes
from hvd_train.progress import order
from hvd_train.world.world import Place, World, barrier, together

WARM_UP_S = 1.0
IN_TRAINING_PROCESS = ("transfer", "prepare")
"""Stages that take whole batches and so run in the training process, not in the loader processes."""


class Laps:
    """Adds up the seconds of each stage: each mark gives the time since the last one to a stage."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, stage: str) -> None:
        """Count the time since the last mark as this stage's, work that the device still had to do included."""
        synchronize(self._device)
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now

    def restart(self) -> None:
        """Forget all seconds so far and begin now."""
        self.seconds.clear()
        self._last = time.perf_counter()


def measure(config: Config, world: World, *, seconds: float, repetitions: int) -> Record:
    """Run the input of a training `repetitions` times for so many seconds and return the record, which all ranks get.

    Raises UsageError where the data cannot be had, as training does.
    """
    config = config.replace(cache="none", cache_dir=None)  # a measurement fills no folder that trainings read later
    place = world.place
    parts = together(world, lambda: build(config, place))
    speeds = world.gather(whole(parts, config, world, seconds=seconds, repetitions=repetitions))
    alone = together(world, lambda: build(config.replace(workers=0, workers_per_host=None), place))
    stages = stage_seconds(alone, config, seconds)
    workers = 0 if isinstance(parts.data.train, Arrays) else loader_processes(config.data, place)
    speed = estimate([sum(of_ranks) for of_ranks in zip(*speeds, strict=True)])
    per_rank = speed.mean / place.size
    return {
        "images_per_second": round(speed.mean, 3),
        "images_per_second_interval": speed.interval,
        "images_per_second_per_worker": round(per_rank, 3),
        "images_per_second_per_process": round(per_rank / max(1, workers), 3),
        "loader_processes_per_worker": workers,
        "cores_per_worker": num_cores(place),
        "workers": place.size,
        "device": parts.device.type,
        "limited_by": limiting(stages, workers, num_cores(place)),
        "stages": [
            {
                "stage": stage,
                "microseconds_per_image": round(per_image * 1e6, 3),
                "images_per_second_per_core": round(1 / per_image, 3),
            }
            for stage, per_image in stages.items()
        ],
        "cores_for_a_gpu": readers.cores_for_a_gpu(config, parts.data.train, seconds),
        "num_samples": parts.train_loader.num_samples,
        "repetitions": repetitions,
        "seconds": seconds,
        "config": config.as_dict(),
    }


def whole(parts: Parts, config: Config, world: World, *, seconds: float, repetitions: int) -> list[float]:
    """Return this rank's images per second in each repetition, with the loader processes that training has."""
    try:
        parts.train_loader.start()
        batches = _batches(parts, config, world.place)
        _take(batches, WARM_UP_S, parts.device)
        speeds = []
        for _ in range(repetitions):
            barrier(world)
            images, passed = _take(batches, seconds, parts.device)
            speeds.append(images / passed)
        return speeds
    finally:
        parts.train_loader.close()


def stage_seconds(parts: Parts, config: Config, seconds: float) -> dict[str, float]:
    """Return the seconds that an image takes at each stage, in this process and on one core (or on the device)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a loader process
    laps = Laps(parts.device)
    try:
        parts.train_loader.watch(laps.mark)
        batches = _batches(parts, config, Place())  # as if alone: of several ranks one may have no part in a step
        _take(batches, WARM_UP_S / 2, parts.device)
        laps.restart()
        images, _ = _take(batches, seconds, parts.device)
    finally:
        torch.set_num_threads(threads)
        parts.train_loader.close()
    return {stage: spent / images for stage, spent in laps.seconds.items()}


def limiting(stages: dict[str, float], workers: int, num_cores: int) -> str:
    """Return the slowest stage on the slower side: that of a rank's loader processes, or that of its training process.

    `stages` are seconds per image, `workers` the loader processes of a rank, which share `num_cores` cores.
    """
    in_training = {stage: spent for stage, spent in stages.items() if stage in IN_TRAINING_PROCESS}
    in_loaders = {stage: spent for stage, spent in stages.items() if stage not in IN_TRAINING_PROCESS}
    at_once = min(workers, num_cores)
    if at_once:
        stages = in_training if sum(in_training.values()) > sum(in_loaders.values()) / at_once else in_loaders
    return max(stages, key=lambda stage: stages[stage])


def table(record: Record) -> str:
    """Write the record as a table for people."""
    processes = record["loader_processes_per_worker"]
    made_by = f"{processes} loader processes a rank" if processes else "the training process"
    interval = record["images_per_second_interval"]
    spread = "" if interval is None else f" (95%: {interval[0]:,.0f} to {interval[1]:,.0f})"
    lines = [
        f"images/s        {record['images_per_second']:,.0f}{spread}",
        f"a process       {record['images_per_second_per_process']:,.0f}",
        f"made by         {made_by}, on {record['cores_per_worker']} cores",
        "",
        f"{'stage':<16}{'us per image':>14}{'images/s a core':>17}",
    ]
    for stage in record["stages"]:
        microseconds = stage["microseconds_per_image"]
        mark = "  <- limits" if stage["stage"] == record["limited_by"] else ""
        lines.append(
            f"{stage['stage']:<16}{written(microseconds):>14}{stage['images_per_second_per_core']:>17,.0f}{mark}"
        )
    if cores := record["cores_for_a_gpu"]:
        by_decoder = ", ".join(f"{number:.1f} with --decode {choice}" for choice, number in cores.items())
        lines += [
            "",
            f"cores for the loader processes of a GPU of {readers.IMAGES_PER_SECOND:,} images/s: {by_decoder}",
        ]
    return "\n".join(lines)


def _batches(parts: Parts, config: Config, place: Place) -> Iterator[Batch]:
    cut = order.choose_cut(config.batch, place.size, parts.train_loader.num_samples)
    return feed.batches(parts.train_loader, config, cut, place)


def _take(batches: Iterator[Batch], seconds: float, device: torch.device) -> tuple[int, float]:
    """Take batches for about `seconds`; return this rank's images in them and the seconds that really passed."""
    images, started = 0, time.perf_counter()
    while True:
        images += sum(len(micro.samples) for micro in next(batches).micro_batches)
        passed = time.perf_counter() - started
        if passed >= seconds:
            synchronize(device)
            return images, time.perf_counter() - started
