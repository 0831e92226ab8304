"""`hvd-train show-data`: a picture of the first training images with labels, and the classes that each rank takes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from hvd_train.config import Config
from hvd_train.console import printable
from hvd_train.data.dataset import Arrays, DataSet
from hvd_train.data.encoded import EncodedImages
from hvd_train.data.transforms import Items
from hvd_train.errors import UsageError
from hvd_train.parts import Parts, build, mixer
from hvd_train.progress import order
from hvd_train.run_files import durable
from hvd_train.step import SLOT
from hvd_train.world.world import Place

_SIDE, _LABEL = 96, 14  # pixels of an image in the picture, and of the line below it
_MOST_IMAGES, _COLUMNS = 64, 8


@dataclass(frozen=True)
class Preview:
    """The file of the picture, and how many samples of each class each rank takes in the first epoch.

    `rank_counts[rank][i]` is the number of samples of `classes[i]`. As a string it is a table of them.
    """

    path: Path
    classes: tuple[str, ...]
    rank_counts: tuple[Counter[int], ...]

    def __str__(self) -> str:
        names = [printable(name) for name in self.classes]
        width = max(map(len, names))
        lines = [f"{'':{width}}  " + "  ".join(f"{f'rank {rank}':>8}" for rank in range(len(self.rank_counts)))]
        for number, name in enumerate(names):
            lines.append(f"{name:{width}}  " + "  ".join(f"{counts[number]:8,}" for counts in self.rank_counts))
        return "\n".join([*lines, f"picture: {self.path}"])


def show(config: Config, ranks: int, path: Path) -> Preview:
    """Draw the first images of a training, count the classes that each of `ranks` ranks takes, and return both.

    Raises UsageError where the training could not start, or where `path` cannot be written as a picture.
    """
    if not config.task.is_of_image_classes:
        raise UsageError(f"show-data shows images of classes; the data of --task {config.task.task} are others")
    config = dataclasses.replace(config, task=config.task.evaluated_as)
    config = config.replace(cache="none", cache_dir=None)  # a look at the data writes nothing but the picture
    parts = build(config, Place())
    num_samples = parts.train_loader.num_samples
    cut = order.choose_cut(config.batch, ranks, num_samples)
    epoch = order.order_of(config.seed, 0, num_samples, config.data.repeated_augmentation)
    try:
        images, names = _first_images(config, parts, cut, epoch)
    finally:
        parts.train_loader.close()
    picture_format = Image.registered_extensions().get(path.suffix.lower())
    if picture_format is None:
        raise UsageError(f"--output {path}: unknown file extension {path.suffix!r}")
    try:
        with durable.writing(path) as file:
            _grid(images, names).save(file, picture_format)
    except (OSError, ValueError) as error:  # ValueError: Pillow reads this format only
        raise UsageError(f"--output {path}: {error}") from None
    rank_counts = []
    labels = _labels(parts.data)
    for rank in range(ranks):
        counts: Counter[int] = Counter()
        for assignment in order.assignments(epoch, 0, cut, rank, ranks):
            for slot in assignment.slots:
                counts.update(labels[torch.from_numpy(slot.indices % num_samples)].tolist())
        rank_counts.append(counts)
    return Preview(path, parts.data.classes, tuple(rank_counts))


def _first_images(config: Config, parts: Parts, cut: order.Cut, epoch: order.Order) -> tuple[Tensor, list[str]]:
    """Return images [count, channels, height, width] as the model takes them, but from 0 to 1, and their labels."""
    mix = mixer(config.data, len(parts.data.classes))
    images: list[Tensor] = []
    names: list[str] = []
    for batch in parts.train_loader.load(0, order.assignments(epoch, 0, cut, 0, 1)):
        for micro in batch.micro_batches:
            torch.manual_seed(order.key(config.seed, SLOT, 0, micro.number))
            mixed, targets = mix(micro.inputs, micro.targets)
            images += list(mixed)
            names += [_name(target, parts.data.classes) for target in targets]
        if len(images) >= _MOST_IMAGES:
            break
    stacked = torch.stack(images[:_MOST_IMAGES]).float().cpu()
    if parts.data.mean:
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (parts.data.mean, parts.data.std))
        stacked = stacked * std + mean
    return stacked.clamp(0, 1), names[:_MOST_IMAGES]


def _name(target: Tensor, classes: tuple[str, ...]) -> str:
    if target.dim() == 0:
        return classes[int(target)]
    shares, numbers = target.topk(2)
    return " ".join(f"{classes[int(n)]} {share:.0%}" for share, n in zip(shares, numbers, strict=True) if share > 0)


def _grid(images: Tensor, names: list[str]) -> Image.Image:
    rows = -(-len(names) // _COLUMNS)
    picture = Image.new("RGB", (_COLUMNS * _SIDE, rows * (_SIDE + _LABEL)), "white")
    draw = ImageDraw.Draw(picture)
    for number, (image, name) in enumerate(zip(images, names, strict=True)):
        values = (image.expand(3, -1, -1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
        left, top = number % _COLUMNS * _SIDE, number // _COLUMNS * (_SIDE + _LABEL)
        picture.paste(Image.fromarray(values).resize((_SIDE - 2, _SIDE - 2), Image.Resampling.NEAREST), (left, top))
        draw.text((left + 2, top + _SIDE - 1), name[: _SIDE // 6], fill="black")
    return picture


def _labels(data: DataSet) -> Tensor:
    """Return the class of each training sample, [samples]; images are read only where nothing else has their class."""
    train = data.train
    if isinstance(train, Items):
        train = train.arrays
    if isinstance(train, Arrays):
        labels: Tensor = train.targets[torch.arange(len(train)) % train.rows]
        return labels
    if isinstance(train, EncodedImages):
        return train.labels
    return torch.tensor([int(train[number][1]) for number in range(len(train))])
