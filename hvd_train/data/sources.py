"""Data sets by name: digits, CIFAR, class folders, synthetic images, or the user's own."""

import importlib.util
import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset

from hvd_train import plugin
from hvd_train.config import DataConfig
from hvd_train.console import say
from hvd_train.data.dataset import IMAGENET_MEAN, IMAGENET_STD, Arrays, Augment, DataSet, MapDataset
from hvd_train.data.hugging_face import open_saved
from hvd_train.data.random_numbers import seed_all
from hvd_train.data.store import without_secrets
from hvd_train.data.trees import form_of
from hvd_train.errors import UsageError, first_line, unknown_name
from hvd_train.launch import launcher
from hvd_train.plugin import HUGGING_FACE, SHARDS

_CIFAR = {  # mean and standard deviation of each channel
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
FOLDER = "folder"
_MOST_CLASSES = 1_000_000  # a larger label is a mistake
# a sequence: training set, and validation set or None
OwnData = Callable[[DataConfig], Sequence[Any] | DataSet]


def check_name(name: str) -> None:
    """Raise UsageError, with the nearest name, if the name of a data set is unknown."""
    if name.startswith(HUGGING_FACE):
        if not Path(name.removeprefix(HUGGING_FACE)).is_dir():
            raise UsageError(
                f"--data {name}: there is no such folder: save a DatasetDict by save_to_disk"
            )
    elif name.startswith(SHARDS):
        if name != without_secrets(name):
            raise UsageError(
                f"--data {without_secrets(name)}: leave out user, password and query, which "
                "would be written to files: put them into the settings of the store"
            )
    elif plugin.is_reference(name):
        plugin.load("data", name)
    elif "/" in name:
        raise UsageError(
            f"--data {name}: for images in a folder type --data folder --data-dir {name}"
        )
    elif name not in (known := (FOLDER, *_OPENERS)):
        raise unknown_name("data set", name, known)


def open_data(
    config: DataConfig,
    seed: int,
    own: OwnData | None = None,
    *,
    any_items: bool = False,
    split: str | None = None,
) -> DataSet:
    """Return the data set of `own` or of the config. Raises UsageError if the data cannot be used.

    With `any_items`, those of `own` may be any trees of tensors, unless it returns a DataSet. A
    `split` (train, val or test) becomes the validation set, without random changes; of class
    folders it is all that is read.
    """
    name = "" if own else config.data
    if name == FOLDER:
        from hvd_train.data.folder import open_folder, open_split

        assert config.data_dir is not None  # checked by DataConfig
        return (
            open_split(config.data_dir, config, split)
            if split
            else open_folder(config.data_dir, config)
        )
    if name.startswith(SHARDS) and not any_items:
        from hvd_train.data.shards import open_images  # slow to import

        data = open_images(config)
        return replace(data, val=getattr(data, split)) if split else data
    if name in _OPENERS:
        data = _OPENERS[name](config, seed)
    elif name.startswith(HUGGING_FACE):
        saved = open_saved(name.removeprefix(HUGGING_FACE), config, any_items=any_items)
        data = _from_result(name, saved, any_items=any_items)
    elif name.startswith(SHARDS):
        from hvd_train.data.shards import open_parts  # slow to import

        data = _from_result(name, open_parts(config), any_items=True)
    else:
        function = own or plugin.load("data", config.data)
        seed_all(seed)
        result = plugin.call(f"--data {config.data}", function, "config", config)
        data = _from_result(config.data, result, any_items=any_items)
    if config.augment in ("trivial", "rand") or config.random_erasing:
        raise UsageError(
            f"--augment {config.augment} and --random-erasing do not go with --data "
            f"{config.data}: they change the images of --data folder; put torchvision's "
            "transforms into a data set of your own"
        )
    augment = None if config.augment == "none" else data.augment
    return replace(data, augment=augment, val=getattr(data, split) if split else data.val)


def of_program(data: Any) -> DataSet:
    """Return a data set of a program's training set.

    Raises UsageError for data that cannot be used.
    """
    return _from_result("custom", (data, None), any_items=True)


def affine_jitter(degrees: float, shift: float, scale: float) -> Augment:
    """Return a change that turns, moves and zooms images; `shift` and
    `scale` are shares of the side.
    """

    def apply(images: Tensor, uniforms: Tensor) -> Tensor:
        turn, zoom, x, y = (2 * uniforms - 1).unbind(1)
        angle = turn * math.radians(degrees)
        zoom = 1 + zoom * scale
        cos = torch.cos(angle) * zoom
        sin = torch.sin(angle) * zoom
        # For grid_sample an image spans -1..1, so that a shift by its whole side is 2.
        theta = torch.stack([cos, -sin, 2 * shift * x, sin, cos, 2 * shift * y], dim=1).view(
            -1, 2, 3
        )
        grid = F.affine_grid(theta, list(images.shape), align_corners=False)
        return F.grid_sample(images, grid, align_corners=False)

    return Augment(4, apply)


def file_of_scikit_learn(name: str) -> Path:
    """Return the path of a file of data, without the library, which is slow to import."""
    package = importlib.util.find_spec("sklearn")
    assert package is not None
    return Path(str(package.origin)).parent / "datasets" / "data" / name


def _digits(config: DataConfig, seed: int) -> DataSet:
    """Return the test part of the UCI Optical Recognition of Handwritten Digits
    (Alpaydin and Kaynak, 1998).
    """
    rows = np.loadtxt(file_of_scikit_learn("digits.csv.gz"), delimiter=",")
    pixels = (rows[:, :-1] * (255 / 16)).round().astype(np.uint8)  # from 0..16
    images = torch.from_numpy(pixels).view(-1, 1, 8, 8)
    labels = torch.from_numpy(rows[:, -1].astype(np.int64))
    shuffled = torch.from_numpy(np.random.default_rng(1998).permutation(len(labels)))
    train, val = (
        Arrays(images[part], labels[part], len(part)) for part in (shuffled[360:], shuffled[:360])
    )
    change = affine_jitter(degrees=10, shift=0.1, scale=0.1)
    return DataSet(train, val, tuple(map(str, range(10))), 1, (0.305,), (0.376,), change)


def crop_and_flip(padding: int) -> Augment:
    """Return a change that shifts images by up to `padding` pixels and mirrors half of them."""

    def apply(images: Tensor, uniforms: Tensor) -> Tensor:
        n, channels, height, width = images.shape
        padded = F.pad(images, (padding,) * 4)
        top, left = (uniforms[:, :2] * (2 * padding + 1)).long().unbind(1)
        rows = top[:, None] + torch.arange(height, device=images.device)
        columns = left[:, None] + torch.arange(width, device=images.device)
        columns = torch.where(uniforms[:, 2:3] < 0.5, columns, columns.flip(1))
        # One gather takes a third of the time of an index for each dimension.
        pixels = rows[:, :, None] * padded.shape[3] + columns[:, None, :]
        pixels = pixels.view(n, 1, height * width).expand(-1, channels, -1)
        return padded.flatten(2).gather(2, pixels).view(images.shape)

    return Augment(3, apply)


def _cifar(config: DataConfig, seed: int) -> DataSet:
    import torchvision.datasets
    from filelock import FileLock

    name = config.data
    cls = getattr(torchvision.datasets, name.upper())
    root = config.data_dir or Path("data")
    try:
        if config.download:
            root.mkdir(parents=True, exist_ok=True)
            # one of the ranks of a host downloads, the others wait
            with FileLock(root / f".{name}.lock"):
                cls(root, train=True, download=True)
        parts = [cls(root, train=train) for train in (True, False)]
    except (RuntimeError, OSError) as error:
        raise UsageError(
            f"--data {name}: not found whole in {root} ({first_line(error)}); add --download "
            "or name its --data-dir"
        ) from None
    train, val = (
        Arrays(
            torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(),
            torch.tensor(part.targets),
            len(part),
        )
        for part in parts
    )
    return DataSet(train, val, tuple(parts[0].classes), 3, *_CIFAR[name], crop_and_flip(padding=4))


def of_files(config: DataConfig, files: Sequence[Path], classes: tuple[str, ...]) -> DataSet:
    """Return a data set of image files without labels (all are 0), prepared like
    the images of an evaluation.

    Raises UsageError if it is not known how the config's own data make an image of a file.
    """
    from torchvision.transforms import v2

    from hvd_train.data.folder import ImageFiles, evaluation_transform, to_shape

    if config.has_files:
        data = DataSet((), None, classes, mean=IMAGENET_MEAN, std=IMAGENET_STD)
        transform = evaluation_transform(config)
    elif config.data in _CIFAR:
        data = DataSet((), None, classes, 3, *_CIFAR[config.data])
        transform = to_shape((3, 32, 32))
    else:
        data = open_data(config, 0)
        source: Any = data.train if data.val is None else data.val
        image = source.images[0] if isinstance(source, Arrays) else source[0][0]
        transforms = [getattr(each, "transform", None) for each in inner_sets(source)]
        own = next(filter(None, transforms), None)
        if own is None and image.dtype != torch.uint8:
            advice = (
                "give its validation set the attribute `transform`, from a PIL image to the tensor"
            )
            raise UsageError(
                f"--data {config.data}: it is not known how it makes an image of a file: {advice}"
            )
        transform = to_shape(image.shape) if own is None else v2.Compose([v2.ToPILImage(), own])
    source = ImageFiles(
        Path(), [(str(file), 0) for file in files], transform, config.max_image_pixels
    )
    return replace(data, train=source, val=source, test=None, augment=None)


def _synthetic(config: DataConfig, seed: int) -> DataSet:
    """Return random images, at most 256 different ones, to measure throughput."""
    size = config.image_size or 224
    rows = min(256, config.synthetic_samples)
    generator = torch.Generator()
    generator.manual_seed(seed)
    images = torch.randint(0, 256, (rows, 3, size, size), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, config.synthetic_classes, (rows,), generator=generator)
    train = Arrays(images, labels, config.synthetic_samples)
    val = Arrays(images, labels, min(rows, 64))
    classes = tuple(map(str, range(config.synthetic_classes)))
    return DataSet(train, val, classes, 3, IMAGENET_MEAN, IMAGENET_STD)


_OPENERS: dict[str, Callable[[DataConfig, int], DataSet]] = {
    "digits": _digits,
    "cifar10": _cifar,
    "cifar100": _cifar,
    "synthetic": _synthetic,
}


def _from_result(name: str, result: Any, *, any_items: bool) -> DataSet:
    """Return the data set in `result`, of the user's function `name`.

    Raises UsageError now or as items are read.
    """
    origin = f" of --data {name}" if plugin.is_reference(name) else ""
    titles = [f"the {part} set{origin}" for part in ("training", "validation", "test")]
    if not isinstance(result, DataSet):
        if not isinstance(result, (tuple, list)) or len(result) != 2 or result[0] is None:
            wanted = "write a function that returns (training set, validation set or None)"
            raise UsageError(f"--data {name} returned {form_of(result)}: {wanted}")
        train, val = result
        if any_items:
            check_map_style(titles[0], train)
            if val is not None:
                check_map_style(titles[1], val)
            classes = tuple(map(str, getattr(train, "classes", ())))
            return DataSet(train, val, classes, images=False)
        classes = _class_names(name, titles[0], train)
        image = _checked(titles[0], train, len(classes))[0][0]
        result = DataSet(train, val, classes, channels=len(image) if image.ndim == 3 else 3)
    parts = zip(titles, (result.train, result.val, result.test), strict=True)
    train, val, test = (_checked(title, part, len(result.classes)) for title, part in parts)
    checked: DataSet = replace(result, train=train, val=val, test=test)
    return checked


@dataclass(frozen=True)
class _CheckedItems:
    """A map-style data set that checks each item, and returns labels as ints."""

    title: str
    data: MapDataset
    num_classes: int
    form: tuple[object, ...] | None = None  # type and shape of all images

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        item: Any = self.data[index]
        with suppress(TypeError, ValueError):  # it is no pair, or the label is no integer
            image, label = item
            number = int(operator.index(label))
            is_image = isinstance(image, Tensor) and self.form in (None, (image.dtype, image.shape))
            if is_image and 0 <= number < self.num_classes:
                return image, number
        raise UsageError(
            f"item {index} of {self.title} is {form_of(item)}; return (image tensor, integer "
            f"class number from 0 on, below {self.num_classes}), with images of one type and size, "
            "or name another --task"
        )


def inner_sets(data: Any) -> Iterator[Any]:
    """Yield a data set and those that it wraps."""
    yield data
    wrapped: Sequence[Any] = ()
    match data:
        case ConcatDataset():
            wrapped = data.datasets
        case Subset():
            wrapped = [data.dataset]
        case _CheckedItems():
            wrapped = [data.data]
    for each in wrapped:
        yield from inner_sets(each)


def file_of(data: Any, number: int) -> str:
    """Return the file of a sample, or nothing if its set does not say so."""
    match data:
        case ConcatDataset():
            place = bisect_right(data.cumulative_sizes, number)
            before = [0, *data.cumulative_sizes][place]
            return file_of(data.datasets[place], number - before)
        case Subset():
            return file_of(data.dataset, data.indices[number])
        case _CheckedItems():
            return file_of(data.data, number)
    if hasattr(data, "content_of_files") and hasattr(data, "path"):  # a set of ours
        return str(data.path(number))
    with suppress(AttributeError, TypeError, ValueError, LookupError):
        file, _ = data.samples[number]  # of torchvision
        return file if isinstance(file, str) else ""
    return ""


def follows_epochs(data: Any) -> list[Any]:
    """Return the sets in `data` that have a method `begin_epoch`."""
    return [each for each in inner_sets(data) if callable(getattr(each, "begin_epoch", None))]


def check_apart(train: Any, other: Any) -> None:
    """Raise UsageError if a set to evaluate would be changed as the training
    set is, from epoch to epoch.
    """
    changing = {id(each) for each in follows_epochs(train)}
    if both := [each for each in follows_epochs(other) if id(each) in changing]:
        name = type(both[0]).__name__
        raise UsageError(
            f"{name}.begin_epoch would change the set to evaluate, too: make a "
            f"{name} of its own for it"
        )


def check_map_style(title: str, part: Any) -> None:
    """Raise UsageError that begins with `title` for data without length or items."""
    is_tensors = isinstance(part, tuple) and all(isinstance(each, Tensor) for each in part)
    has_items = hasattr(part, "__len__") and hasattr(part, "__getitem__")
    if is_tensors or isinstance(part, IterableDataset) or not has_items:
        raise UsageError(
            f"{title} is {form_of(part)}; give torch.utils.data.TensorDataset(inputs, targets) or "
            "another map-style data set, with __len__ and __getitem__, not a DataLoader: batches "
            "are made for any number of ranks"
        )
    if not len(part):
        raise UsageError(f"{title} is empty")


def _class_names(name: str, title: str, data: Any) -> tuple[str, ...]:
    """Return the names of the classes of a training set, or the numbers up to its largest label."""
    whole = data
    while isinstance(whole, Subset):  # as random_split makes them
        whole = whole.dataset
    with suppress(TypeError):  # `classes` is no list
        if names := tuple(map(str, getattr(whole, "classes", ()))):
            return names
    items = _checked(title, data, _MOST_CLASSES)
    if not isinstance(items, Arrays) and launcher.prints():
        say(
            f"--data {name}: reading all labels to count the classes; an attribute "
            "`classes` saves that"
        )
    labels = (
        items.labels.tolist()
        if isinstance(items, Arrays)
        else [items[index][1] for index in range(len(items))]
    )
    return tuple(map(str, range(max(labels) + 1)))


def _checked(title: str, part: Any, num_classes: int) -> Any:
    """Return a set whose labels are known to be class numbers, or are checked as they are read."""
    if part is None:
        return None
    check_map_style(title, part)
    items = _CheckedItems(title, part, num_classes)
    image, _ = items[0]
    # --sample-weights may name another attribute
    if type(part) is TensorDataset and vars(part).keys() <= {"tensors", "classes"}:
        part = Arrays(part.tensors[0], part.tensors[1], len(part))
    if not isinstance(part, Arrays):
        return replace(items, form=(image.dtype, image.shape))
    labels = part.labels.reshape(-1)
    for index in torch.nonzero((labels < 0) | (labels >= num_classes))[:1]:
        items[int(index)]  # raises the error
    return replace(part, labels=labels.long())
