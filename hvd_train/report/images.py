"""Draw what a training sees (`hvd-train show-data`)."""

from contextlib import closing
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from hvd_train.config import Config
from hvd_train.data.augment import mixer
from hvd_train.data.dataset import DataSet
from hvd_train.errors import UsageError
from hvd_train.parts import Parts, build
from hvd_train.progress import order
from hvd_train.run_files import durable
from hvd_train.updater import MICRO_BATCH
from hvd_train.world.world import Place

_SIDE, _LABEL = 96, 14  # pixels of an image in the picture, and of the line below it
_MOST_IMAGES, _COLUMNS = 64, 8


def show(config: Config, path: Path) -> None:
    """Draw the first images in a file. Raises UsageError."""
    parts = build(config, Place())
    if not parts.data.images:
        raise UsageError("show-data shows images with class numbers, and these data have other items")
    num_samples = parts.train_loader.num_samples
    layout = order.choose_layout(config.batch, 1, num_samples)
    epoch = order.EpochOrder(config.seed, 0, num_samples)
    with closing(parts.train_loader):
        images, captions = _images(config, parts, layout, epoch)
    picture_format = Image.registered_extensions().get(path.suffix.lower())
    if picture_format is None:
        raise UsageError(f"--output {path}: unknown file extension {path.suffix!r}; write it as in show-data.png")
    try:
        with durable.writing(path) as file:
            _grid(images, captions).save(file, picture_format)
    except (OSError, ValueError) as error:  # ValueError: Pillow reads this format only
        raise UsageError(f"--output {path}: {getattr(error, 'strerror', None) or error}") from None


def _images(config: Config, parts: Parts, layout: order.BatchLayout, epoch: order.Order) -> tuple[Tensor, list[str]]:
    """Return the first images, scaled to 0 to 1, and their labels."""
    mix = mixer(config.data, len(parts.data.classes))
    images, names = list[Tensor](), list[str]()
    for batch in parts.train_loader.load(0, order.assignments(epoch, 0, layout, 0, 1)):
        for micro in batch.micro_batches:
            torch.manual_seed(order.key(config.seed, MICRO_BATCH, 0, micro.number))
            mixed, targets = mix(*micro.batch)
            images += list(mixed)
            names += [_name(target, parts.data.classes) for target in targets]
        if len(images) >= _MOST_IMAGES:
            break
    return _restored(torch.stack(images[:_MOST_IMAGES]), parts.data), names[:_MOST_IMAGES]


def _restored(images: Tensor, data: DataSet) -> Tensor:
    values = images.float().cpu()
    if data.mean:
        mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (data.mean, data.std))
        return (values * std + mean).clamp(0, 1)
    return (values - values.min()) / (values.max() - values.min()).clamp_min(1e-12)


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
