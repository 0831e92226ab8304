"""Data sets in files, read in any order: WebDataset's tar files, tokens, and Hugging Face's `datasets`."""

import bisect
import importlib
import itertools
import os
import re
import tarfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hvd_train import plain_file
from hvd_train.console import say
from hvd_train.errors import UsageError, first_few

Parts = Mapping[str, bytes]
"""The files of a sample by their extension, such as jpg and cls, and its name as `__key__`."""
SUFFIX = ".index.npz"
_VALIDATION = ("validation", "val", "valid", "dev", "test")  # names of this set in a DatasetDict


class Shards(Dataset[Any]):
    """The samples of tar files. Files with one name up to the first dot of it are a sample.

    The first use of a tar file reads its headers, and writes an index of 16 bytes a file next to it.
    """

    def __init__(self, files: Sequence[str | Path], decode: Callable[[Parts], Any] = dict) -> None:
        """`decode` makes an item of the files of a sample. Raises UsageError for files that cannot be used."""
        self.files, self.decode = [Path(file) for file in files], decode
        if not self.files:
            raise UsageError("Shards: there are no tar files")
        self._indices = [index_of(file) for file in self.files]
        self._ends = list(itertools.accumulate(len(rows) for _, rows, _ in self._indices))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        shard = bisect.bisect_right(self._ends, number)
        extensions, rows, keys = self._indices[shard]
        row = number - (self._ends[shard] - len(rows))
        parts: dict[str, Any] = {"__key__": str(keys[row])}
        with plain_file.opened(self.files[shard]) as file:
            for extension, (offset, size) in zip(extensions, rows[row].tolist(), strict=True):
                file.seek(offset)
                parts[extension] = file.read(size)
        return self.decode(parts)


Index = tuple[tuple[str, ...], npt.NDArray[np.int64], npt.NDArray[np.str_]]
"""Extensions; offset and size of each file, [samples, extensions, 2]; keys, [samples]."""


def index_of(file: Path) -> Index:
    """Return the index of a tar file, and write it next to the file if that is possible. Raises UsageError."""
    path = file.with_name(file.name + SUFFIX)
    try:
        size = file.stat().st_size
        with suppress(OSError, ValueError, KeyError), plain_file.opened(path) as saved, np.load(saved) as found:
            if int(found["size"]) == size:
                return tuple(found["extensions"].tolist()), found["rows"], found["keys"]
        say(f"making the index of {file}")
        extensions, rows, keys = index = _scanned(file)
    except (OSError, tarfile.TarError) as error:
        raise UsageError(f"{file}: cannot be read as a tar file without compression ({error})") from None
    with suppress(OSError):  # a folder without write access: the next start makes it again
        new = path.with_name(f"{path.name}.{os.getpid()}")
        with open(new, "xb") as output:
            np.savez(output, size=size, extensions=extensions, rows=rows, keys=keys)
        os.replace(new, path)
    return index


def _scanned(file: Path) -> Index:
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    with tarfile.open(file, "r:") as members:
        for member in members:
            parts = re.fullmatch(r"((?:.*/)?[^/.]*)\.([^/]+)", member.name)
            if member.isfile() and parts:
                samples.setdefault(parts[1], {})[parts[2]] = (member.offset_data, member.size)
            members.members = []  # type: ignore[attr-defined]  # it would keep them all
    extensions = tuple(dict.fromkeys(itertools.chain(*samples.values())))
    if not samples:
        raise UsageError(f"{file} has no files with an extension")
    if odd := [key for key, files in samples.items() if len(files) < len(extensions)]:
        missing = [extension for extension in extensions if extension not in samples[odd[0]]]
        raise UsageError(f"{file}: the sample {odd[0]} has no .{first_few(missing, 3)}, which others have")
    rows = np.array([[files[extension] for extension in extensions] for files in samples.values()], np.int64)
    return extensions, rows, np.array(list(samples))


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """The tokens of a file in sequences of `block`; an epoch has each sequence once.

    The file has integers of a numpy type one after another: `uint16` in nanoGPT's, `uint8` for the bytes of a text.
    Item i has the tokens from `i * block` on, int64 [block], and for each the one that follows, int64 [block].
    """

    def __init__(self, file: str | Path, block: int, dtype: str = "uint16") -> None:
        """Raises UsageError for a file that cannot be read or is shorter than a sequence."""
        self.file, self.block, self.dtype = Path(file), block, np.dtype(dtype)
        try:
            num_tokens = self.file.stat().st_size // self.dtype.itemsize
        except OSError as error:
            raise UsageError(f"{file}: {error.strerror}") from None
        self._count = (num_tokens - 1) // block
        if self._count < 1:
            raise UsageError(
                f"{file} has {num_tokens} tokens of type {self.dtype}: a sequence of {block} needs one more"
            )

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self._count:
            raise IndexError(index)
        begin = index * self.block * self.dtype.itemsize
        tokens = torch.from_numpy(np.fromfile(self.file, self.dtype, self.block + 1, offset=begin).astype(np.int64))
        return tokens[:-1], tokens[1:]


def open_saved(path: str, *, any_items: bool) -> tuple[Any, Any]:
    """Return the training and the validation set (or None) in a folder of `DatasetDict.save_to_disk`.

    With `any_items`, items are mappings with tensors; else each is an image and a class number. Raises UsageError.
    """
    try:
        library: Any = importlib.import_module("datasets")
    except ImportError:
        raise UsageError(f"--data hf:{path}: datasets is not installed: pip install datasets") from None
    try:
        parts = library.load_from_disk(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"--data hf:{path}: {str(error).splitlines()[0]}") from None
    if "train" not in (parts if isinstance(parts, dict) else ()):
        raise UsageError(f"--data hf:{path}: it has no part called train: save a DatasetDict with train and validation")
    val = next((parts[name] for name in _VALIDATION if name in parts), None)
    if any_items:
        return tuple(part and part.with_format("torch") for part in (parts["train"], val))  # type: ignore[return-value]
    kinds = {name: type(feature).__name__ for name, feature in parts["train"].features.items()}
    image, label = (next((name for name in kinds if kinds[name] == kind), "") for kind in ("Image", "ClassLabel"))
    if not (image and label):
        raise UsageError(f"--data hf:{path}: its columns are {kinds}: classification needs an Image and a ClassLabel")
    train, val = (part and LabelledImages(part, image, label) for part in (parts["train"], val))
    return train, val


class LabelledImages:
    """The images of a data set as colours, uint8 [3, h, w], with their class numbers."""

    def __init__(self, data: Any, image: str, label: str) -> None:
        self._data, self._image, self._label = data, image, label
        self.classes: list[str] = data.features[label].names

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from torchvision.transforms.functional import pil_to_tensor  # slow to import

        row = self._data[index]
        return pil_to_tensor(row[self._image].convert("RGB")), int(row[self._label])
