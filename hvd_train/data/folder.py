"""Images in class folders, such as train/CLASS/*.jpg, and of Hugging Face,
decoded by simplejpeg or Pillow.
"""

import os
import struct
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset
from torchvision.transforms import v2

from hvd_train import plain_file
from hvd_train.config import DataConfig
from hvd_train.data.dataset import IMAGENET_MEAN, IMAGENET_STD, DataSet
from hvd_train.errors import UsageError, first_few, first_line

Transform = Callable[[Tensor], Tensor]
_VAL_CROP = 224 / 256  # fraction of the shorter side that evaluation shows; usual since AlexNet
_DAMAGED = (
    ValueError,
    TypeError,
    SyntaxError,
    EOFError,
    LookupError,
    ArithmeticError,
    struct.error,
)
# the file is damaged, has too many pixels or is no image in a supported format
UNREADABLE = (OSError, *_DAMAGED)
_FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")  # torchvision's IMG_EXTENSIONS
_ORIENTATION = 0x0112  # a tag of Exif


class ImageFiles:
    """The images of files; an item is (image, uint8 [3, height, width], class number).

    No image is kept in memory.
    """

    def __init__(
        self, root: Path, samples: Sequence[tuple[str, int]], transform: Transform, max_pixels: int
    ) -> None:
        """`samples` are the names of files below `root`, and their class numbers."""
        names = np.array([os.fsencode(name) for name, _ in samples])
        # Tensors, not lists: loader processes share their memory.
        self.labels = torch.tensor([label for _, label in samples])
        self._names = torch.from_numpy(names.view(np.uint8).reshape(len(names), -1))
        self._root = root
        self._transform = transform
        self._max_pixels = max_pixels

    def __len__(self) -> int:
        return len(self.labels)

    def content_of_files(self) -> bytes:
        """Return bytes that are others if a name or a label is another."""
        return self._names.numpy().tobytes() + self.labels.numpy().tobytes()

    def path(self, index: int) -> Path:
        """Return the file of an image."""
        return self._root / os.fsdecode(self._names[index].numpy().tobytes().rstrip(b"\0"))

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]:
        """Return an item. Raises UsageError, which names the file."""
        path = self.path(index)
        return self._transform(_decoded(path, str(path), self._max_pixels)), int(self.labels[index])


class LabelledImages:
    """The images of a data set of Hugging Face; an item is (image, uint8 [3,
    height, width], class number).
    """

    def __init__(self, name: str, data: Any, image: str, label: str, config: DataConfig) -> None:
        """`data` is not decoded; `image` and `label` are columns.

        With `config.image_size` images are square.
        """
        self.classes: list[str] = data.features[label].names
        self._name = name
        self._data = data
        self._image = image
        self._label = label
        self._max_pixels = config.max_image_pixels
        self._transform = (
            to_shape((3, config.image_size, config.image_size))
            if config.image_size
            else v2.Identity()
        )

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]:
        """Return an item. Raises UsageError, which names it."""
        row = self._data[index]
        stored = row[self._image]
        content = stored["bytes"] or Path(stored["path"])
        image = _decoded(content, f"{index} of {self._name}", self._max_pixels)
        return self._transform(image), int(row[self._label])


def _decoded(content: Path | bytes, name: str, max_pixels: int) -> Tensor:
    """Return the pixels of a file, or of its content. Raises UsageError, which names it."""
    try:
        return decode(
            content if isinstance(content, bytes) else plain_file.read_bytes(content), max_pixels
        )
    except UNREADABLE as error:
        raise UsageError(
            f"cannot read the image {name}: {first_line(error)}; fix it, or remove it"
        ) from None


def images_in(paths: Sequence[Path]) -> list[Path]:
    """Return these files, and the images below these folders.

    Raises UsageError if there are none.
    """
    found = []
    for path in paths:
        below = [file for file in sorted(path.rglob("*")) if _is_image(str(file.relative_to(path)))]
        if not (images := [path] if path.is_file() else below):
            raise UsageError(f"{path}: no such image or folder with images")
        found += images
    return found


def open_folder(root: Path, config: DataConfig) -> DataSet:
    """Return the data set of train/, val/ and an optional test/ in `root`.

    Raises UsageError for wrong folders.
    """
    splits = ["train", "val", *(["test"] if (root / "test").is_dir() else [])]
    classes = _classes(root / "train")
    for split in splits[1:]:
        if only := sorted(set(classes) ^ set(_classes(root / split))):
            raise UsageError(
                f"{root}: train/ and {split}/ must have the same classes; only in "
                f"one: {first_few(only)}"
            )
    train = _images(root / "train", classes, training_transform(config), config)
    others = {
        split: _images(root / split, classes, evaluation_transform(config), config)
        for split in splits[1:]
    }
    return DataSet(
        train,
        others["val"],
        tuple(classes),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        test=others.get("test"),
    )


def open_split(root: Path, config: DataConfig, split: str) -> DataSet:
    """Return the data set whose only images are of one split, or of the class folders in `root`.

    Raises UsageError.
    """
    part = (
        root / split if any((root / name).is_dir() for name in ("train", "val", "test")) else root
    )
    classes = _classes(part)
    images = _images(part, classes, evaluation_transform(config), config)
    return DataSet(images, images, tuple(classes), mean=IMAGENET_MEAN, std=IMAGENET_STD)


def _images(
    root: Path, classes: Sequence[str], transform: Transform, config: DataConfig
) -> ImageFiles:
    """Return the images below `root`/CLASS. Raises UsageError if a class has none."""
    start = len(str(root)) + 1
    numbers = {name: number for number, name in enumerate(classes)}
    try:
        samples = make_dataset(
            str(root), numbers, is_valid_file=lambda path: _is_image(path[start:])
        )
    except FileNotFoundError as error:
        raise UsageError(f"{root}: {error}") from None
    return ImageFiles(
        root, [(path[start:], label) for path, label in samples], transform, config.max_image_pixels
    )


def training_transform(config: DataConfig) -> v2.Compose:
    """Return what makes an image of a training out of the pixels of a file.

    The order follows torchvision's training references. TrivialAugment: Müller and Hutter, arXiv
    2103.10158. RandAugment: Cubuk et al., arXiv 1909.13719, with their 2 operations of magnitude 9.
    Random erasing: Zhong et al., arXiv 1708.04896, filled with the mean colour.
    """
    size = config.image_size or 224
    steps: list[v2.Transform] = [
        v2.RandomResizedCrop(size, antialias=True),
        v2.RandomHorizontalFlip(),
    ]
    if config.augment == "none":
        steps = _middle(round(size / _VAL_CROP), size)
    if config.augment == "trivial":
        steps.append(v2.TrivialAugmentWide(interpolation=v2.InterpolationMode.BILINEAR))
    if config.augment == "rand":
        steps.append(v2.RandAugment(interpolation=v2.InterpolationMode.BILINEAR))
    if config.random_erasing > 0:
        colour = [round(255 * share) for share in IMAGENET_MEAN]
        steps.append(v2.RandomErasing(p=config.random_erasing, value=colour))
    return v2.Compose(steps)


def evaluation_transform(config: DataConfig) -> v2.Compose:
    """Return what makes an image of an evaluation out of the pixels of a file."""
    crop = config.val_crop_size or config.image_size or 224
    return v2.Compose(_middle(config.val_resize_size or round(crop / _VAL_CROP), crop))


def to_shape(shape: Sequence[int]) -> v2.Compose:
    """Return what makes an image of `shape` [1 or 3, height, width] of pixels [3,
    height, width], both uint8.
    """
    grey = [v2.Grayscale()] if shape[0] == 1 else []
    return v2.Compose(
        [*grey, v2.Resize(max(shape[1:]), antialias=True), v2.CenterCrop(list(shape[1:]))]
    )


def _middle(resize: int, crop: int) -> list[v2.Transform]:
    # The longest side is limited, since a file may claim one row of a million pixels.
    return [v2.Resize(resize, max_size=64 * resize, antialias=True), v2.CenterCrop(crop)]


def _classes(split: Path) -> list[str]:
    with suppress(OSError):
        if names := [name for name in find_classes(str(split))[0] if not _is_hidden(name)]:
            return names
    if next(split.glob("ILSVRC2012_val_*"), None):
        raise UsageError(f"{split} has no class folders: type `hvd-train valprep {split}`")
    raise UsageError(
        f"{split} is missing or empty; --data-dir must hold train/ and val/ with "
        "one folder per class"
    )


def _is_image(path: str) -> bool:
    return path.lower().endswith(IMG_EXTENSIONS) and not any(map(_is_hidden, path.split(os.sep)))


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "__MACOSX"))  # file managers make ._1.jpg and .cache


def decode(data: bytes, max_pixels: int = DataConfig.max_image_pixels) -> Tensor:
    """Return the pixels of an image file, upright, as uint8 [3, height, width].

    Raises UNREADABLE if the file cannot be decoded or, before allocating them, has more than
    `max_pixels` pixels.
    """
    # Pillow refuses images above twice this limit
    Image.MAX_IMAGE_PIXELS = max_pixels / 2  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            # a warning names no file, and each image with odd Exif data gives some
            warnings.simplefilter("ignore")
            with Image.open(BytesIO(data), formats=_FORMATS) as image:
                pixels = None
                if (
                    image.format == "JPEG"
                    and image.mode == "RGB"
                    and image.getexif().get(_ORIENTATION, 1) == 1
                ):
                    # in two thirds of Pillow's time
                    pixels = _decode_jpeg(data, (image.height, image.width))
                return torch.from_numpy(
                    _decode_by_pillow(image) if pixels is None else pixels
                ).permute(2, 0, 1)
    except UnidentifiedImageError:
        raise ValueError(f"it is damaged, or none of {', '.join(_FORMATS)}") from None
    except Image.DecompressionBombError:
        raise ValueError(
            f"it has more pixels than --max-image-pixels {max_pixels} allows"
        ) from None


def _decode_jpeg(data: bytes, size: tuple[int, int]) -> np.ndarray | None:
    """Return pixels [height, width, 3], or None if simplejpeg refuses the file or finds
    another `size` than Pillow.
    """
    with suppress(ValueError):
        if simplejpeg.decode_jpeg_header(data)[:2] == size:
            return np.asarray(simplejpeg.decode_jpeg(data))
    return None


def _decode_by_pillow(image: Image.Image) -> np.ndarray:
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I;16"):  # Pillow would cut the values off at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode[0] in "IF":
        raise ValueError(
            f"it is of mode {image.mode}: grey values have 8 bits, or 16 without a sign"
        )
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))
