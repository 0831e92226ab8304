"""Items of data sets as the bytes of shards: WebDataset's tar files, and MDS as Streaming reads it.

The bytes are a function of the items alone, so that a shard can be written again.
"""

import io
import json
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from hvd_train.data.identity import digest_of_bytes
from hvd_train.data.random_numbers import seed_on_cpu
from hvd_train.data.shard_formats import INDEX, table_to_keep
from hvd_train.data.shards import IMAGES, TYPES
from hvd_train.data.store import Store
from hvd_train.data.stored import ImageFile
from hvd_train.data.trees import form_of
from hvd_train.errors import UsageError, counted, first_line

_BLOCK = 512  # bytes, of tar
_MOST_OF_MDS = (1 << 32) - 1  # bytes: places in a shard have 32 bits
_MDS = {"version": 2, "format": "mds", "compression": None, "hashes": (), "size_limit": None}
_MDS_IMAGES = ("png", "jpeg")
_SIZED = ("int", *TYPES.values())  # encodings whose values all have one size
_NUMBERS = "biufc"  # kinds of numpy's types that torch has, too


def _parts(
    number: int, source: Any, part: Callable[[str, Any], tuple[str, bytes]]
) -> dict[str, tuple[str, bytes]]:
    """Return the kind and the content of each part of an item of a data set, as `part` makes them.

    Parts are values by name, or by number; an image and a class number are `image` and `cls`.
    Raises UsageError if one cannot be written.
    """
    seed_on_cpu(number)  # a shard that is written again should be the same
    item = source[number]
    if not isinstance(item, Mapping):
        item = dict(enumerate(item if isinstance(item, (tuple, list)) else [item]))
    values = {}
    for name, value in item.items():
        with _naming(number, name, value):
            values[str(name)] = _plain(value)
    image = values.get("0")
    label = values.get("1")
    if len(values) == 2 and isinstance(image, ImageFile) and type(label) is int:
        values = {"image": image, "cls": label}
    parts = {}
    for name, value in values.items():
        with _naming(number, name, value):
            parts[name] = part(name, value)
    return parts


@contextmanager
def _naming(number: int, name: str, value: object) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, OverflowError, OSError) as error:
        raise UsageError(
            f"item {number}: {name!r} is {form_of(value)}, which cannot be written "
            f"({first_line(error)}): return tensors, arrays, numbers, texts, bytes, images of "
            "Pillow, or what JSON has"
        ) from None


def _plain(value: Any) -> Any:
    """Return an array of numbers, an int, an ImageFile for an image, or the value itself.

    An array uint8 [3, height, width] is an image: a PNG keeps it as it is.
    """
    if isinstance(value, Tensor):
        value = value.numpy(force=True)
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.kind not in _NUMBERS:
            raise TypeError(f"values of type {value.dtype}")
        if value.ndim == 0 and value.dtype.kind in "iu":
            return int(value)
        value = np.asarray(value, value.dtype.newbyteorder("<"))
        if value.dtype != np.uint8 or value.ndim != 3 or len(value) != 3:
            return value
        value = Image.fromarray(np.moveaxis(value, 0, 2))
    if isinstance(value, Image.Image):
        file = io.BytesIO()
        value.save(file, "png")
        return ImageFile(file.getvalue(), "png")
    return value


class TarWriter:
    """Tar files: a part of a sample is the file NUMBER.NAME.KIND, or NUMBER.KIND."""

    name = "shard-{:05}.tar".format
    """Returns the name of a shard by its number."""

    def sample(self, number: int, source: Any) -> bytes:
        """Return an item of a data set as a sample. Raises UsageError if it cannot be written."""
        blocks = []
        names = set()
        for name, (kind, content) in _parts(number, source, _part_in_tar).items():
            is_plain = name == kind or (name == "image" and kind in IMAGES)
            member = tarfile.TarInfo(f"{number:09}.{kind if is_plain else f'{name}.{kind}'}")
            if member.name.lower() in names:
                raise UsageError(f"item {number}: {name!r} has the name of another in a tar file")
            names.add(member.name.lower())
            member.size = len(content)
            blocks += [member.tobuf(), content, bytes(-len(content) % _BLOCK)]
        return b"".join(blocks)

    def shard(self, samples: list[bytes]) -> list[bytes]:
        """Return the bytes of a shard of these samples, in pieces."""
        return [*samples, bytes(2 * _BLOCK)]

    def index(self, folder: Path, shards: list[list[int]]) -> tuple[str, bytes]:
        """Return the name and the content of the index of a folder."""
        path, content, _ = table_to_keep(Store(str(folder), folder))
        return Path(path).name, content


def _part_in_tar(name: str, value: Any) -> tuple[str, bytes]:
    """Return the kind and the content of a plain value.

    Raises TypeError or ValueError if a tar file has no place for it.
    """
    if not name or "/" in name:
        raise ValueError("no file of a tar file can have this name")
    if isinstance(value, ImageFile):
        return value.kind, value.content
    if isinstance(value, str):
        return "txt", value.encode()
    if isinstance(value, bytes):
        return "bin", value
    if type(value) is int:
        return "cls", b"%d" % value
    if isinstance(value, np.ndarray):
        file = io.BytesIO()
        np.save(file, value)
        return "npy", file.getvalue()
    return "json", json.dumps(value).encode()


class MdsWriter:
    """MDS: the parts of all samples have the names and kinds of the first."""

    name = "shard.{:05}.mds".format
    """Returns the name of a shard by its number."""

    def __init__(self, source: Any) -> None:
        """Raises UsageError if the first item of the data set cannot be written."""
        self._kinds: dict[str, str] = {}
        parts = _parts(0, source, self._part)
        self._kinds = {name: kind for name, (kind, _) in parts.items()}
        self._sizes = [len(content) if kind in _SIZED else None for kind, content in parts.values()]
        columns = {
            "column_names": [*self._kinds],
            "column_encodings": [*self._kinds.values()],
            "column_sizes": self._sizes,
        }
        self._config = {**_MDS, **columns}

    def sample(self, number: int, source: Any) -> bytes:
        """Return an item of a data set as a sample. Raises UsageError if it cannot be written."""
        parts = _parts(number, source, self._part)
        kinds = {name: kind for name, (kind, _) in parts.items()}
        if kinds != self._kinds:
            raise UsageError(
                f"item {number} has {kinds}, and item 0 has {self._kinds}: samples of MDS are "
                "alike; make them so, or write --format wds"
            )
        contents = [parts[name][1] for name in self._kinds]
        lengths = [
            len(content)
            for content, size in zip(contents, self._sizes, strict=True)
            if size is None
        ]
        return b"".join([np.array(lengths, "<u4").tobytes(), *contents])

    def shard(self, samples: list[bytes]) -> list[bytes]:
        """Return the bytes of a shard of these samples, in pieces."""
        config = json.dumps(self._config, sort_keys=True).encode()
        places = np.cumsum([0, *map(len, samples)]) + 4 * (len(samples) + 2) + len(config)
        if places[-1] > _MOST_OF_MDS:
            raise UsageError("a shard would be too large for MDS: type a smaller --shard-size")
        numbers = np.array([len(samples), *places], "<u4")
        return [numbers.tobytes(), config, *samples]

    def index(self, folder: Path, shards: list[list[int]]) -> tuple[str, bytes]:
        """Return the name and the content of the index of a folder.

        `shards` have their numbers of samples and of bytes.
        """
        listed = [
            {
                **self._config,
                "raw_data": {"basename": self.name(number), "bytes": size, "hashes": {}},
                "samples": count,
                "zip_data": None,
            }
            for number, (count, size) in enumerate(shards)
        ]
        return INDEX, json.dumps({"version": 2, "shards": listed}).encode()

    def _part(self, name: str, value: Any) -> tuple[str, bytes]:
        """Return the kind and the content of a plain value.

        Raises TypeError, ValueError or OverflowError if MDS has no place for it.
        """
        if isinstance(value, ImageFile):
            # one encoding serves all: readers find the format in the content
            known = self._kinds.get(name)
            own = "png" if value.kind == "png" else "jpeg"
            return known if known in _MDS_IMAGES else own, value.content
        if isinstance(value, str):
            return "str", value.encode()
        if isinstance(value, bytes):
            return "bytes", value
        if type(value) is int:
            return "int", np.int64(value).tobytes()
        if type(value) is float:
            return "float64", np.float64(value).tobytes()
        if not isinstance(value, np.ndarray):
            return "json", json.dumps(value).encode()
        if value.dtype.name not in TYPES.values() or not value.size:
            raise ValueError("MDS has no such arrays")
        if not value.ndim:
            return value.dtype.name, value.tobytes()
        number = next(number for number, name in TYPES.items() if name == value.dtype.name)
        shape = np.array(value.shape, "<u8")  # 3 in the second byte says so
        return "ndarray", bytes([number, value.ndim << 2 | 3]) + shape.tobytes() + value.tobytes()


ShardWriter = TarWriter | MdsWriter
"""Makes the bytes of samples and of shards."""


def open_writer(name: str, source: Any, size: int) -> ShardWriter:
    """Return the writer of a format (wds or mds) for a data set.

    Raises UsageError if the set is empty, its first item cannot be written, or shards of this size
    are too large for the format.
    """
    if not len(source):
        raise UsageError("a training or validation set has no samples")
    if name == "mds" and size > _MOST_OF_MDS:
        raise UsageError(f"--shard-size is {size:,}: the most for mds is {_MOST_OF_MDS:,}")
    return MdsWriter(source) if name == "mds" else TarWriter()


def digest_of_set(source: Any, writer: ShardWriter) -> str:
    """Return the number of samples of a set, and a digest of its files and of a few samples."""
    content = getattr(source, "content_of_files", bytes)()
    numbers = sorted({0, len(source) // 2, len(source) - 1})
    samples = [writer.sample(number, source) for number in numbers]
    return (
        f"{counted(len(source), 'sample')}, digest {digest_of_bytes(b''.join([content, *samples]))}"
    )
