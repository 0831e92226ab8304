"""Where the samples of shards are: WebDataset's tar files, and MDS as Streaming writes it.

Tar files have no table of their samples, so one pass over their headers makes one, unless a table
is kept next to them.
"""

import io
import json
import re
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from typing_extensions import override

from hvd_train.console import say
from hvd_train.data.identity import digest_of_bytes
from hvd_train.data.store import CONNECTIONS, File, Store
from hvd_train.errors import UsageError, counted, first_few, first_line
from hvd_train.progress.clock import Timer
from hvd_train.progress.order import Indices

INDEX = "index.json"
KEY = "__key__"
_TAR = ".tar"
_BLOCK = 512  # bytes, of tar
_LEAST = 1 << 12  # bytes of a request for headers; smaller files are read, not skipped
_MOST = 1 << 20
_LINES_S = 10.0  # between two lines of progress
_VERSION = 1  # of the table of tar files
_HEAD = 4096  # bytes at the start of a tar file that a kept table knows
_SEAL = 16  # bytes at the end of a kept table

Sample = dict[str, Any]
"""The content of each file or column of a sample, in bytes, and its key if it has one."""
Place = tuple[File, int, int]
"""A shard, and the first byte of a sample there and the one after its last."""


class _Shards:
    """Shards and their samples, in stored order."""

    def __init__(self, store: Store, files: list[File], firsts: Indices) -> None:
        """`firsts` are the number of each shard's first sample, and at last of all samples."""
        self.store = store
        self.files = files
        self.firsts = firsts
        if not len(self):
            raise UsageError(f"{store.shown}: its {counted(len(files), 'shard')} have no samples")

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def shard_of(self, index: int) -> int:
        """Return the number of the shard that has a sample."""
        return int(np.searchsorted(self.firsts, index, side="right")) - 1


def open_files(store: Store) -> "ShardFiles":
    """Return the shards of a store, after the table of tar files is made. Raises UsageError."""
    index = _index_of_mds(store)
    return TarFiles(store) if index is None else MdsFiles(store, index)


def _index_of_mds(store: Store) -> bytes | None:
    return None if store.url.endswith(_TAR) else store.content(INDEX)


def table_to_keep(store: Store) -> tuple[str, bytes, int]:
    """Return where the table of a store's tar files belongs, its content, and how many samples it
    has.

    Raises UsageError.
    """
    if _index_of_mds(store) is not None:
        raise UsageError(f"{store.shown} is in MDS format, whose {INDEX} is all that it needs")
    files = _tar_files(store)
    words = _words_of(store, files, room=0)
    content = words.tobytes()
    return _kept_path(files), content + _seal(store, files, content), int(words[len(files)])


class TarFiles(_Shards):
    """Tar files. Consecutive files whose paths are equal up to the first dot of the name are a
    sample; the rest of the name, in lower case, names the part.

    The table is one memory-mapped file of 8 bytes for each sample and 24 for each shard.
    """

    def __init__(self, store: Store) -> None:
        files = _tar_files(store)
        kept = store.find(_kept_path(files))
        used = files if kept is None else [*files, kept]
        listed = [store.url, _VERSION, *((file.path, file.size, file.version) for file in used)]
        path = store.cache / "indexes" / f"{digest_of_bytes(repr(listed).encode())}.index"
        store.made(path, lambda partial: _write_table(store, files, kept, partial))
        self._path = path
        firsts = self._map(len(files))
        super().__init__(store, files, np.array(firsts))

    def _map(self, num_shards: int) -> Indices:
        """Map the table into memory, and return the number of each shard's first sample."""
        words = np.memmap(self._path, "<i8", "r")
        ends = np.cumsum([num_shards + 1, num_shards])
        firsts: Indices
        firsts, self._checks, self._offsets = np.split(words, ends)
        return firsts

    def __getstate__(self) -> dict[str, Any]:
        # loader processes map the table themselves: a pickle would copy it
        mapped = ("_checks", "_offsets")
        return {name: value for name, value in vars(self).items() if name not in mapped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._map(len(self.files))

    def identity(self) -> bytes:
        """Return bytes that change with the content of the shards."""
        names = "\n".join(file.name for file in self.files)
        return names.encode() + self.firsts.tobytes() + self._checks.tobytes()

    def place(self, index: int) -> Place:
        """Return the place of a sample."""
        shard = self.shard_of(index)
        # a shard has one more offset than samples
        start, stop = self._offsets[index + shard : index + shard + 2]
        return self.files[shard], int(start), int(stop)

    def parse(self, content: bytes) -> Sample:
        """Return the sample in these bytes. Raises ValueError or tarfile.TarError."""
        sample: Sample = {}
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            for member in _members(tar):
                key, name = _split(member)
                if not key:
                    continue
                if name in sample:
                    raise ValueError(f"it has two files .{name}")
                file = tar.extractfile(member)
                assert file is not None  # it is a regular file
                sample |= {KEY: key, name: file.read()}
        return sample

    def kinds(self, sample: Sample) -> dict[str, str]:
        """Return how each part of a sample is encoded."""
        return {name: name.rpartition(".")[2] for name in sample if name != KEY}


def _tar_files(store: Store) -> list[File]:
    if files := store.files(_TAR):
        return files
    raise UsageError(f"{store.shown}: there is no {INDEX} of MDS and no *{_TAR}")


def _kept_path(files: list[File]) -> str:
    """Return where the table of these files is kept: other files have it at another path.

    Copies have other times and versions than their originals, so neither counts.
    """
    listed = [_VERSION, *((file.name, file.size) for file in files)]
    folder = files[0].path.rpartition("/")[0]
    return f"{folder}/.hvd_train-{digest_of_bytes(repr(listed).encode())}.index"


def _seal(store: Store, files: list[File], table: bytes) -> bytes:
    """Return a digest of a table and of the first bytes of each tar file."""

    def head(file: File) -> bytes:
        return store.read_listed(file, 0, min(file.size, _HEAD))

    with ThreadPoolExecutor(CONNECTIONS) as threads:
        heads = threads.map(head, files)
        return digest_of_bytes(b"".join([table, *heads])).encode()


def _write_table(store: Store, files: list[File], kept: File | None, path: Path) -> None:
    if kept is not None:
        content: bytes = store.patiently(
            f"read {kept.name}", lambda system: system.cat_file(kept.path)
        )
        table = content[:-_SEAL]
        if content[-_SEAL:] == _seal(store, files, table):
            path.write_bytes(table)
            return
        say(
            f"{store.shown}: {kept.name} is damaged or of other shards: reading all headers; type "
            f"`hvd-train index {store.shown}` to make it again"
        )
    # a shard that is read anyway should not be fetched twice
    words = _words_of(store, files, room=0 if store.is_local else store.room())
    words.tofile(path)


def _words_of(store: Store, files: list[File], room: int) -> Indices:
    """Return the table of tar files, after one pass over their headers.

    Files that `room` bytes of this host have place for are copied.
    """
    progress = Timer(_LINES_S, time.monotonic)
    ends = np.cumsum([file.size for file in files])
    offsets = []
    checks = []
    with ThreadPoolExecutor(CONNECTIONS) as threads:
        tables = threads.map(partial(_table_of, store), files, (ends <= room).tolist())
        for number, (table, check) in enumerate(tables, 1):
            offsets.append(table)
            checks.append(check)
            if progress.comes():
                say(f"{store.shown}: read the headers of {number:,} of {len(files):,} shards")
    firsts = np.cumsum([0, *(len(table) - 1 for table in offsets)])
    words = np.concatenate([firsts, np.array(checks, np.uint64).view(np.int64), *offsets])
    return words.astype("<i8", copy=False)


class _Headers(io.RawIOBase):
    """A tar file in a store. Requests for its headers grow while one follows another."""

    def __init__(self, store: Store, file: File) -> None:
        self._store = store
        self._file = file
        self._place = 0
        self._begin = 0  # of the bytes that are here
        self._bytes = b""

    @override
    def tell(self) -> int:
        return self._place

    @override
    def seek(self, place: int, whence: int = io.SEEK_SET, /) -> int:
        self._place = place
        return place

    @override
    def read(self, size: int = -1, /) -> bytes:
        end = min(self._place + size, self._file.size)
        if end <= self._place:
            return b""
        if not self._begin <= self._place < end <= self._begin + len(self._bytes):
            gap = self._place - self._begin - len(self._bytes)
            length = min(2 * len(self._bytes), _MOST) if gap < len(self._bytes) else _LEAST
            self._begin = self._place
            stop = min(max(end, self._begin + length), self._file.size)
            self._bytes = self._store.read_listed(self._file, self._begin, stop)
        found = self._bytes[self._place - self._begin : end - self._begin]
        self._place += len(found)
        return found


def _opened(store: Store, file: File, is_copied: bool) -> BinaryIO | _Headers:
    if is_copied:
        store.copy(file)
        with suppress(FileNotFoundError):  # others may remove it to make room
            return open(store.copy_of(file), "rb")
    if store.is_local:
        with store.reaching(f"read {file.name}"):
            return open(file.path, "rb")
    return _Headers(store, file)


def _table_of(store: Store, file: File, is_copied: bool) -> tuple[Indices, int]:
    """Return where the samples of a shard begin, and where the last one ends; and a digest of all
    names, sizes and times.

    Raises UsageError if it cannot be read.
    """
    with _opened(store, file, is_copied) as content:
        try:
            return _table_in(content)
        except tarfile.TarError as error:
            raise UsageError(
                f"{store.shown}: cannot read {file.name}: {first_line(error)}; write the "
                "shard again"
            ) from None


def _table_in(content: BinaryIO | _Headers) -> tuple[Indices, int]:
    starts = [0]
    words = []
    last = ""
    with tarfile.open(fileobj=content, mode="r:") as tar:
        for member in _members(tar):
            key, _ = _split(member)
            if key and key != last:
                # what lies between two samples goes with the first
                starts += [member.offset] if last else []
                last = key
            words.append(f"{member.name} {member.size} {member.mtime}")
        starts += [tar.offset] if last else []
    digest = digest_of_bytes("\n".join(words).encode())
    return np.array(starts, np.int64), int(digest, 16)


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the files in a tar file. Raises tarfile.ReadError if it is damaged."""
    while (member := tar.next()) is not None:
        tar.members = []  # type: ignore[attr-defined]  # else it keeps all
        if member.isreg():
            yield member
    file: BinaryIO = tar.fileobj  # type: ignore[assignment]
    file.seek(tar.offset)
    if file.read(_BLOCK).strip(b"\0"):  # tarfile ends at what is no header
        raise tarfile.ReadError(f"it is damaged at byte {tar.offset:,}")


def _split(member: tarfile.TarInfo) -> tuple[str, str]:
    """Return the key and the name of a part, or empty texts for a file of no sample."""
    found = re.match(r"((?:.*/)?[^.]+)\.([^/]*)$", member.name)
    is_meta = re.match(r"__[^/]*__($|/)", member.name)
    return (found[1], found[2].lower()) if found and not is_meta else ("", "")


class MdsFiles(_Shards):
    """MDS: index.json has the shards, and each shard begins with a table of its samples, so
    nothing needs to be made or kept.
    """

    def __init__(self, store: Store, index: bytes) -> None:
        self._index = index
        try:
            shards = json.loads(index)["shards"]
            if other := {str(each["format"]) for each in shards} - {"mds"}:
                raise UsageError(
                    f"{store.shown}: its format is {first_few(sorted(other))}, not mds"
                )
            root = store.path_of("")
            files = [_file_of(store, root, each) for each in shards]
            counts = [int(each["samples"]) for each in shards]
            first = shards[0] if shards else {}
            columns = ("column_names", "column_encodings", "column_sizes")
            self._columns = [*zip(*(first.get(name, ()) for name in columns), strict=True)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{store.shown}: {INDEX} is damaged ({error!r})") from None
        super().__init__(store, files, np.cumsum([0, *counts]))

    def identity(self) -> bytes:
        """Return bytes that change with the content of the shards."""
        return self._index

    def place(self, index: int) -> Place:
        """Return the place of a sample, which its shard tells."""
        shard = self.shard_of(index)
        number = index - int(self.firsts[shard])
        file = self.files[shard]
        place = 4 * (1 + number)
        table = np.frombuffer(self.store.read(file, place, place + 8), "<u4")
        start, stop = map(int, table) if len(table) == 2 else (0, 0)
        if not place < start <= stop:
            raise UsageError(
                f"{self.store.shown}: {file.name} is damaged: sample {number} of it would be at "
                f"byte {start:,}; write the shard again"
            )
        return file, start, stop

    def parse(self, content: bytes) -> Sample:
        """Return the sample in these bytes. Raises ValueError."""
        sizes = []
        place = 0
        for _, _, size in self._columns:
            if size is None:
                size = int(np.frombuffer(content[place : place + 4], "<u4")[0])
                place += 4
            sizes.append(size)
        if place + sum(sizes) != len(content):
            raise ValueError(f"it has {len(content):,} bytes, not {place + sum(sizes):,}")
        sample: Sample = {}
        for (name, _, _), size in zip(self._columns, sizes, strict=True):
            sample[name] = content[place : place + size]
            place += size
        return sample

    def kinds(self, sample: Sample) -> dict[str, str]:
        """Return how each part of a sample is encoded."""
        return {name: encoding for name, encoding, _ in self._columns}


ShardFiles = TarFiles | MdsFiles


def _file_of(store: Store, root: str, shard: dict[str, Any]) -> File:
    raw = shard["raw_data"]
    packed = shard.get("zip_data")
    if packed and not str(shard.get("compression")).startswith("zstd"):
        raise UsageError(
            f"{store.shown}: its compression is {shard.get('compression')}: only zstd can be read"
        )
    name = (packed or raw)["basename"]
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"the shard {name} would be outside of the folder")
    if packed:
        return File(name, root + name, packed["bytes"], unpacked=raw["bytes"])
    return File(name, root + name, raw["bytes"])
