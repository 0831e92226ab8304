"""Samples in tar files, as WebDataset writes them: any order and any rank, by an index that is made once."""

import bisect
import itertools
import os
import tarfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from hvd_train import plain_file
from hvd_train.console import say
from hvd_train.errors import UsageError, first_few

Parts = Mapping[str, bytes]
"""The files of a sample by their extension, such as jpg and cls, and its name as `__key__`."""
SUFFIX = ".index.npz"


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
            folder, _, name = member.name.rpartition("/")
            key, _, extension = name.partition(".")
            if member.isfile() and extension:
                samples.setdefault(f"{folder}/{key}" if folder else key, {})[extension] = (
                    member.offset_data,
                    member.size,
                )
            members.members = []  # type: ignore[attr-defined]  # it would keep them all
    extensions = tuple(dict.fromkeys(itertools.chain(*samples.values())))
    if not samples:
        raise UsageError(f"{file} has no files with an extension")
    if odd := [key for key, files in samples.items() if len(files) < len(extensions)]:
        missing = [extension for extension in extensions if extension not in samples[odd[0]]]
        raise UsageError(f"{file}: the sample {odd[0]} has no .{first_few(missing, 3)}, which others have")
    rows = np.array([[files[extension] for extension in extensions] for files in samples.values()], np.int64)
    return extensions, rows, np.array(list(samples))
