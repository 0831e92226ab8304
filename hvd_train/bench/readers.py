"""How many cores read and decode the images that a GPU takes, by who decodes JPEG files."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from hvd_train.config import Config
from hvd_train.data.dataset import Source
from hvd_train.data.encoded import EncodedImages
from hvd_train.data.lent_memory import Task
from hvd_train.data.loader_process import TaskReader, Unreadable
from hvd_train.errors import UsageError
from hvd_train.progress import order
from hvd_train.world.world import Place

IMAGES_PER_SECOND = 3_000
"""What a GPU takes, of a ResNet-50 in half precision for instance."""


def cores_for_a_gpu(config: Config, source: Source, seconds: float) -> dict[str, float]:
    """Return how many cores loader processes keep busy with IMAGES_PER_SECOND, by `--decode`.

    `source` is the training set of the config, without a cache; where it has no encoded images, nothing is returned.
    What one core takes in `seconds` of processor time is measured: of the loader processes alone, and so without a GPU.
    Raises UsageError where an image cannot be read.
    """
    if not isinstance(source, EncodedImages):
        return {}
    from hvd_train.data import views  # slow to import

    found = {}
    for choice in ("cpu", "gpu"):
        try:
            data = replace(config.data, decode=choice)
        except UsageError:  # a GPU does not go with all random changes
            continue
        images = source.seen_with(views.of_training(data))
        found[choice] = round(IMAGES_PER_SECOND * _processor_seconds(config, images, seconds), 3)
    return found


def _processor_seconds(config: Config, source: EncodedImages, seconds: float) -> float:
    """Return the processor time that an image takes in a loader process."""
    reader, tasks = TaskReader(source, config.seed), _tasks(config, len(source))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a loader process
    try:
        _read(reader, next(tasks))
        images, started = 0, time.process_time()
        while time.process_time() - started < seconds:
            images += _read(reader, next(tasks))
        return (time.process_time() - started) / images
    finally:
        torch.set_num_threads(threads)


def _tasks(config: Config, num_samples: int) -> Iterator[Task]:
    """Yield the tasks of loader processes, as if one rank trained, epoch after epoch without an end."""
    cut = order.choose_cut(config.batch, Place().size, num_samples)
    for epoch in itertools.count():
        samples = order.order_of(config.seed, epoch, num_samples, config.data.repeated_augmentation)
        for assignment in order.assignments(samples, 0, cut, Place().rank, Place().size):
            for slot in assignment.slots:
                yield Task([(epoch, int(sample)) for sample in slot.indices], None, None)


def _read(reader: TaskReader, task: Task) -> int:
    """Read the images of a task and return how many there are."""
    batch = reader[task]
    if isinstance(batch, Unreadable):
        raise UsageError(batch.reason)
    return len(task.samples)
