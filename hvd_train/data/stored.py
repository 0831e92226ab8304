"""Data sets to write as shards: their images are the stored files."""

import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

from hvd_train import plain_file, plugin
from hvd_train.config import DataConfig
from hvd_train.data.dataset import DataSet
from hvd_train.data.hugging_face import columns_of, saved_parts, undecoded
from hvd_train.data.sources import FOLDER, check_name, open_data
from hvd_train.errors import UsageError, first_line
from hvd_train.plugin import HUGGING_FACE


@dataclass(frozen=True)
class ImageFile:
    """The content of an image file, and its kind, such as jpg."""

    content: bytes
    kind: str


def open_stored(data: str) -> DataSet:
    """Return the data set of a folder with train/ and val/, hf:FOLDER or package.module:function.

    Raises UsageError.
    """
    if data.startswith(HUGGING_FACE):
        check_name(data)
        train, val = saved_parts(data.removeprefix(HUGGING_FACE))
        labels = columns_of(train, "ClassLabel")
        classes = train.features[labels[0]].names if labels else ()
        return DataSet(_Rows(train), val and _Rows(val), tuple(classes))
    if plugin.is_reference(data):
        return open_data(DataConfig(data=data), 0, any_items=True)
    if not Path(data).is_dir():
        raise UsageError(
            f"{data}: no such folder: name one with train/ and val/, hf:FOLDER, or your own data "
            "as package.module:function"
        )
    found = open_data(DataConfig(data=FOLDER, data_dir=Path(data)), 0)
    return replace(found, train=_Files(found.train), val=_Files(found.val))


class _Files:
    """The images of class folders; an item is an ImageFile and a class number."""

    def __init__(self, images: Any) -> None:
        self._images = images
        self.content_of_files = images.content_of_files

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int, /) -> Any:
        path = self._images.path(index)
        try:
            content = plain_file.read_bytes(path)
        except OSError as error:
            raise UsageError(f"cannot read the image {path}: {error.strerror}") from None
        return ImageFile(content, path.suffix[1:].lower()), int(self._images.labels[index])


class _Rows:
    """The rows of a data set of Hugging Face, with an ImageFile for each image.

    The first image and the first class number are `image` and `cls`, as readers of shards find
    them.
    """

    def __init__(self, part: Any) -> None:
        self._images = columns_of(part, "Image")
        found = {"image": self._images, "cls": columns_of(part, "ClassLabel")}
        taken = set(part.features)
        self._names = {
            columns[0]: name for name, columns in found.items() if columns and name not in taken
        }
        for name in self._images:
            part = undecoded(part, name)
        self._rows = part.with_format("torch")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int, /) -> Any:
        row = self._rows[index]
        return {
            self._names.get(name, name): _image_file(index, value)
            if name in self._images
            else value
            for name, value in row.items()
        }


def _image_file(index: int, stored: Any) -> ImageFile | None:
    """Return an image of a row. Raises UsageError if it is in no format that Pillow knows."""
    if stored is None:
        return None
    try:
        content = stored["bytes"] or plain_file.read_bytes(stored["path"])
        with Image.open(io.BytesIO(content)) as image:
            kind = str(image.format).lower()
            # what many phones write: a JPEG with further images after it
            return ImageFile(content, "jpeg" if kind == "mpo" else kind)
    except OSError as error:
        raise UsageError(f"cannot read the image of row {index}: {first_line(error)}") from None
