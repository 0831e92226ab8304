"""A data set of samples in shards, in a folder or an object store."""

import io
import json
import operator
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from typing_extensions import override

from hvd_train.config import DataConfig
from hvd_train.console import say
from hvd_train.data.dataset import IMAGENET_MEAN, IMAGENET_STD, DataSet
from hvd_train.data.hugging_face import VALIDATION
from hvd_train.data.identity import digest_of_bytes
from hvd_train.data.shard_formats import KEY, Sample, open_files, table_to_keep
from hvd_train.data.store import TIMEOUT_S, Store, bytes_of
from hvd_train.errors import UsageError, counted, first_few, first_line, place_in_user_code
from hvd_train.launch import launcher
from hvd_train.plugin import SHARDS
from hvd_train.progress.order import Indices

Decode = Callable[[Sample], Any]
CLASSES = "classes.txt"
_LABELS = ("cls", "class", "label", "y")
IMAGES = ("jpg", "jpeg", "png", "webp", "ppm", "pgm", "bmp", "tif", "tiff")
TYPES = {  # of values in MDS, by their numbers there
    **{bits: f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{bits + 1: f"int{bits}" for bits in (8, 16, 32, 64)},
    **{bits + 2: f"float{bits}" for bits in (16, 32, 64)},
}
_SCALARS = {"int": "int64", **{name: name for name in TYPES.values()}}


class Shards:
    """A map-style data set of WebDataset's tar files, or of a folder in MDS format.

    An item is a dict by extension (column) with the sample's `__key__`, if it has one: images are
    uint8 [3, height, width], `cls` and integers are ints, `txt` is a str, `json` is plain, arrays
    are tensors, anything else stays bytes.
    """

    def __init__(
        self,
        url: str | Path,
        decode: Decode | None = None,
        *,
        cache: str | Path | None = None,
        cache_size: str | int | None = None,
        data_timeout: float = TIMEOUT_S,
    ) -> None:
        """`url` is a folder or a URL of fsspec, or names tar files, also by * and {000..123}.

        `decode` makes an item of a dict of bytes. Shards at a URL are copied to the folder `cache`
        (default: ~/.cache/hvd_train), up to `cache_size` (such as 500GB; default: until a tenth of
        the disk is left; 0 reads each sample from the URL). A store that fails is tried again for
        `data_timeout` seconds.

        Raises UsageError if the shards cannot be found or read.
        """
        self._files = open_files(_store(url, cache, cache_size, data_timeout))
        self._decode = decode

    def __len__(self) -> int:
        return len(self._files)

    @property
    def shard_starts(self) -> Indices:
        """The number of each shard's first sample, and at last of all samples."""
        return self._files.firsts

    @property
    def longest_wait_s(self) -> float:
        """How long a read may wait for a store that fails."""
        store = self._files.store
        return 0.0 if store.is_local else store.timeout_s

    def shards_of(self, samples: Indices) -> Indices:
        """Return the numbers of the shards of these samples, int64 [n]."""
        return np.searchsorted(self.shard_starts, samples, side="right") - 1

    def fetch(self, shard: int) -> None:
        """Copy a shard to this host, unless it is read in place.

        Raises UsageError or DataTimeout.
        """
        self._files.store.copy(self._files.files[shard])

    def have_room(self, shards: Collection[int], num_ranks: int) -> bool:
        """Return whether copies of these shards, and as many of other ranks, fit on this host."""
        store = self._files.store
        files = [self._files.files[shard] for shard in shards]
        size = sum(file.size_of_copy for file in files if store.copies(file))
        return not size or store.has_room_for(num_ranks * size)

    def release(self, shard: int) -> None:
        """Let the copy of a shard make room for others first."""
        self._files.store.release(self._files.files[shard])

    def content_of_files(self) -> bytes:
        """Return bytes that are others if the shards are others."""
        return self._files.identity()

    def path(self, index: int) -> str:
        """Return the shard of a sample, and where it is there."""
        file, start, _ = self._files.place(index)
        return f"{file.name}, byte {start:,}"

    def __getitem__(self, index: int, /) -> Any:
        """Return an item. Raises: UsageError, which says where a damaged sample is; DataTimeout."""
        number = operator.index(index)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        files = self._files
        file, start, stop = files.place(number)
        content = files.store.read(file, start, stop)
        sample: Sample = {}
        try:
            if len(content) != stop - start:
                raise ValueError("the shard ends before")
            sample = files.parse(content)
            return (self._decode or self._decoded)(sample)
        except Exception as error:  # what decodes may raise anything
            name = f"{sample[KEY]!r}, " if KEY in sample else ""
            advice = "write the shard again"
            if (path := files.store.copy_of(file)).exists():
                advice = f"delete the copy {path}, or {advice} if that is damaged, too"
            raise UsageError(
                f"{files.store.shown}: cannot read sample {number} ({name}bytes {start:,} to "
                f"{stop:,} of {file.name}): {type(error).__name__}: {first_line(error)}"
                f"{place_in_user_code(error)}; {advice}"
            ) from error

    def _decoded(self, sample: Sample) -> Any:
        kinds = self._files.kinds(sample)
        return {
            name: _value(name, kinds[name], part) if name in kinds else part
            for name, part in sample.items()
        }


def keep_table(url: str) -> str:
    """Write the table of tar files next to them, and return what was written.

    Raises UsageError if they cannot be read, or the URL cannot be written.
    """
    store = _store(url, cache_size=0)
    path, content, num_samples = table_to_keep(store)
    store.write(path, content)
    return f"{store.shown}: wrote {Path(path).name}, for {counted(num_samples, 'sample')}"


def _store(
    url: str | Path,
    cache: str | Path | None = None,
    cache_size: str | int | None = None,
    data_timeout: float = TIMEOUT_S,
) -> Store:
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Store(
        str(url),
        Path(cache or Path(folder, "hvd_train")).expanduser().absolute(),
        None if cache_size is None else bytes_of(cache_size),
        data_timeout,
    )


def _settings(config: DataConfig) -> dict[str, Any]:
    return {
        "cache": config.cache_dir,
        "cache_size": config.cache_size,
        "data_timeout": config.data_timeout,
    }


class LabelledShards(Shards):
    """The images of shards; an item is (image, uint8 [3, height, width], class number).

    Without a transform it is the class number alone.
    """

    def __init__(
        self,
        url: str,
        config: DataConfig,
        transform: Callable[[Tensor], Tensor] | None = None,
        num_classes: int = sys.maxsize,
    ) -> None:
        super().__init__(url, **_settings(config))
        self._transform = transform
        self._max_pixels = config.max_image_pixels
        self._num_classes = num_classes

    @override
    def _decoded(self, sample: Sample) -> Any:
        kinds = self._files.kinds(sample)
        image = next((name for name in kinds if kinds[name] in IMAGES), None)
        label = next((name for name in _LABELS if name in kinds), None)
        if image is None or label is None:
            raise ValueError(
                f"it has {first_few([*kinds])}: classification needs an image, such as jpg, and cls"
            )
        number = int(_value(label, kinds[label], sample[label]))
        if not 0 <= number < self._num_classes:
            raise ValueError(f"its class is {number}, and there are {self._num_classes}")
        if self._transform is None:
            return number
        from hvd_train.data.folder import decode  # slow to import

        return self._transform(decode(sample[image], self._max_pixels)), number

    def count_classes(self, title: str) -> int:
        """Return the number of classes, after reading all labels, once on this host."""
        store = self._files.store
        listed = [store.url, *((file.path, file.size, file.version) for file in self._files.files)]
        path = store.cache / "indexes" / f"{digest_of_bytes(repr(listed).encode())}.classes"
        if launcher.prints() and not path.exists():
            say(
                f"{title}: reading all labels to count the classes; a file {CLASSES} there, with "
                "a name a line, saves that"
            )

        def count() -> int:
            return 1 + max(int(self[number]) for number in range(len(self)))

        def write(unfinished: Path) -> None:
            unfinished.write_text(str(count()))

        if not all(file.version for file in self._files.files):
            return count()  # other labels would not be noticed
        store.made(path, write)
        return int(path.read_text())


def open_images(config: DataConfig) -> DataSet:
    """Return the images of shards:URL. Raises UsageError."""
    from hvd_train.data import folder  # slow to import

    train, val = _urls(config)
    classes = _classes(config, train)

    def images(url: str, transform: Callable[[Tensor], Tensor]) -> LabelledShards:
        return LabelledShards(url, config, transform, len(classes))

    return DataSet(
        images(train, folder.training_transform(config)),
        images(val, folder.evaluation_transform(config)) if val else None,
        classes,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )


def _classes(config: DataConfig, train: str) -> tuple[str, ...]:
    store = _store(config.data.removeprefix(SHARDS), config.cache_dir)
    names = store.content(CLASSES)
    if names is not None:
        return tuple(names.decode(errors="replace").splitlines())
    labels = LabelledShards(train, config)
    return tuple(map(str, range(labels.count_classes(f"--data {config.data}"))))


def open_parts(config: DataConfig) -> tuple[Shards, Shards | None]:
    """Return the training and the validation set (or None) of shards:URL, for any task.

    Raises UsageError.
    """
    train, val = (Shards(url, **_settings(config)) if url else None for url in _urls(config))
    assert train is not None
    return train, val


def _urls(config: DataConfig) -> tuple[str, str | None]:
    """Return the URLs of the training and the validation set (or None)."""
    train, val = _sets_in(config.data.removeprefix(SHARDS))
    if train is None:
        raise UsageError(f"--data {config.data}: there is no folder train and no *train*.tar")
    return train, val


def urls_of_sets(url: str) -> list[str]:
    """Return the URLs of the training and the validation set at a URL, or the URL of one set."""
    found = () if url.endswith(".tar") else _sets_in(url)
    return [*filter(None, found)] or [url]


def _sets_in(url: str) -> tuple[str | None, str | None]:
    """Return the URLs of the training and the validation set, each if it is there: folders, or
    tar files with these words in their names.
    """
    url = url.rstrip("/")
    names = _store(url).names()

    def named(*parts: str) -> str | None:
        for part in parts:
            if part in names:
                return f"{url}/{part}"
            if any(part in name and name.endswith(".tar") for name in names):
                return f"{url}/*{part}*.tar"
        return None

    return named("train"), named(*VALIDATION)


def _value(name: str, kind: str, content: bytes) -> Any:
    """Return what a part of a sample holds. Raises any error for damaged content."""
    base, _, form = kind.partition(":")
    if base in IMAGES:
        from hvd_train.data.folder import decode  # slow to import

        return decode(content)
    if base in _SCALARS:
        return np.frombuffer(content, _SCALARS[base])[0].item()
    if base in _DECODERS:
        return _DECODERS[base](content)
    if base == "ndarray":
        return _array(form, content)
    if base.startswith(("pkl", "list[", "jpeg_array", "jpegarray")):
        raise ValueError(f"{name} is encoded as {kind}: give Shards(..., decode=function)")
    return content


def _pixels(content: bytes) -> Tensor:
    """Return the pixels of `pil`: width, height, length of the mode, mode, bytes."""
    width, height, length = map(int, np.frombuffer(content[:12], "<u4"))
    mode = content[12 : 12 + length].decode()
    image = Image.frombytes(mode, (width, height), content[12 + length :]).convert("RGB")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _array(form: str, content: bytes) -> Tensor:
    """Return an array of MDS. Its type and shape are in `form` (TYPE:1,2,3), or else precede the
    values.
    """
    kind, _, shape = form.partition(":")
    if not kind:
        kind = TYPES[content[0]]
        content = content[1:]
    sizes = np.array(shape.split(",") if shape else [], np.int64)
    if not shape:
        width = 1 << (content[0] & 3)
        end = 1 + (content[0] >> 2) * width
        sizes = np.frombuffer(content[1:end], f"<u{width}").astype(np.int64)
        content = content[end:]
    return torch.from_numpy(np.frombuffer(content, kind).reshape(sizes).copy())


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("cls", "cls2", "count", "index", "inx", "id", "str_int"), int),
    **dict.fromkeys(("txt", "text", "transcript", "str"), bytes.decode),
    "json": json.loads,
    "npy": lambda content: torch.from_numpy(np.load(io.BytesIO(content), allow_pickle=False)),
    "pil": _pixels,
    "str_float": float,
}
