"""The index of a tar shard of images: where the bytes of each are, and its class. It lies beside the shard.

Training reads images in the order of the epoch, so it must know all of them before the first. No torch.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_train import plain_file
from hvd_train.console import PROGRAM
from hvd_train.data.tar_members import BLOCK, Member, members
from hvd_train.errors import UsageError
from hvd_train.numerals import whole_number

SPLITS = {"train": ("train",), "val": ("val", "validation"), "test": ("test",)}
"""What the folders of shards, or the beginnings of their names, are called."""
ENDING = ".index"
_IMAGES = ("jpg", "jpeg", "png", "ppm", "bmp", "pgm", "tif", "tiff", "webp")  # as in class folders
_CLASS, _JSON = "cls", "json"
_MOST_CLASSES = 1 << 16
_MOST_BYTES = {_CLASS: 1 << 10, _JSON: 1 << 20}
_MOST_IMAGE_BYTES = 1 << 30
_KIND = b"hvdtar01"
_HEADER = struct.Struct("<8sQq16sQQ")
"""The kind of file, size and time of change of the shard, digest of its first header, samples, and bytes of keys."""
_DIGEST = 16
Numbers = npt.NDArray[np.int64]


class Identity(NamedTuple):
    """What tells a shard from others of its name: size, time of change in ns, and the digest of its first header."""

    size: int
    changed: int
    begin: bytes

    @classmethod
    def of(cls, descriptor: int) -> Identity:
        """Return that of an open file. Raises OSError."""
        status = os.fstat(descriptor)
        begin = blake2b(os.pread(descriptor, BLOCK, 0), digest_size=_DIGEST).digest()
        return cls(status.st_size, status.st_mtime_ns, begin)


@dataclass(frozen=True)
class ShardIndex:
    """The images of a shard in its order: first byte, number of bytes, and class of each, int64 [samples].

    `keys` are their keys, one after the other, and `key_ends` [samples] where each ends.
    """

    identity: Identity
    offsets: Numbers
    lengths: Numbers
    labels: Numbers
    keys: bytes
    key_ends: Numbers

    def __len__(self) -> int:
        return len(self.labels)

    def key(self, number: int) -> str:
        """Return the key of an image."""
        begin = int(self.key_ends[number - 1]) if number else 0
        return os.fsdecode(self.keys[begin : int(self.key_ends[number])])

    def in_bytes(self) -> bytes:
        """Return the content of the file of the index."""
        content = _HEADER.pack(_KIND, *self.identity, len(self), len(self.keys)) + b"".join(
            numbers.astype("<i8").tobytes() for numbers in (self.offsets, self.lengths, self.labels, self.key_ends)
        )
        content += self.keys
        return content + blake2b(content, digest_size=_DIGEST).digest()


def path_of(shard: Path) -> Path:
    """Return the path of the index of a shard."""
    return shard.with_name(shard.name + ENDING)


def find(root: Path) -> dict[str, list[Path]]:
    """Return the shards of each split in a folder: NAME/*.tar, NAME-*.tar or *-NAME-*.tar, in the order of names.

    Raises UsageError where there is no such folder, or a split is there in two ways.
    """
    if not root.is_dir():
        raise UsageError(f"--data-dir {root} is not a folder; it must hold train/*.tar and val/*.tar")
    found = {}
    for split, names in SPLITS.items():
        patterns = [pattern for name in names for pattern in (f"{name}/*.tar", f"{name}-*.tar", f"*-{name}-*.tar")]
        ways = {pattern: shards for pattern in patterns if (shards := sorted(root.glob(pattern)))}
        if len(ways) > 1:
            raise UsageError(f"{root}: its {split} shards are both {' and '.join(ways)}: leave one of them")
        found[split] = next(iter(ways.values()), [])
    return found


def class_names(folder: Path) -> tuple[str, ...] | None:
    """Return the names of the classes beside shards, from classes.txt (a line each) or classes.json (a list), or None.

    Where the folder is that of a split, they may also be beside it. Raises UsageError for a file of another form.
    """
    of_split = any(folder.name in names for names in SPLITS.values())
    for place in (folder, folder.parent) if of_split else (folder,):
        for path in (place / "classes.txt", place / "classes.json"):
            if path.exists():
                return _names_in(path)
    return None


def _names_in(path: Path) -> tuple[str, ...]:
    try:
        text = plain_file.read_text(path)
        names = json.loads(text) if path.suffix == ".json" else text.splitlines()
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read the names of classes in {path}: {error}") from None
    is_list = isinstance(names, list) and all(isinstance(name, str) and name.strip() for name in names)
    if not is_list or not 0 < len(names) <= _MOST_CLASSES:
        form = "a list of texts" if path.suffix == ".json" else "a line each"
        raise UsageError(f"{path} must hold the names of the classes, {form}, at most {_MOST_CLASSES:,}")
    if len(set(names)) < len(names):
        raise UsageError(f"{path} names a class twice")
    return tuple(names)


def scan(shard: Path) -> ShardIndex:
    """Read a shard and return its index. Raises UsageError, naming the shard and the key, where it cannot be used."""
    names = class_names(shard.parent)
    try:
        with plain_file.opened(shard) as file:
            identity = Identity.of(file.fileno())
            found = _samples(file.fileno(), identity.size, len(names) if names is not None else _MOST_CLASSES)
            if Identity.of(file.fileno()) != identity:
                raise ValueError("it is being written")
    except OSError as error:
        raise UsageError(f"cannot read the shard {shard}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"the shard {shard} cannot be used: {error}") from None
    keys = [os.fsencode(key) for key, _, _ in found]
    return ShardIndex(
        identity,
        np.array([image.offset for _, image, _ in found], dtype=np.int64),
        np.array([image.length for _, image, _ in found], dtype=np.int64),
        np.array([label for _, _, label in found], dtype=np.int64),
        b"".join(keys),
        np.cumsum([len(key) for key in keys], dtype=np.int64),
    )


def _samples(descriptor: int, size: int, num_classes: int) -> list[tuple[str, Member, int]]:
    """Return key, image and class of each sample, in the order of the images. Raises ValueError, OSError."""
    images: dict[str, Member] = {}
    labels: dict[str, dict[str, Member]] = {_CLASS: {}, _JSON: {}}
    for member in members(descriptor, size):
        folder, slash, file = member.name.rpartition("/")
        stem, dot, ending = file.partition(".")
        key, ending = folder + slash + stem, ending.lower()
        if not (stem and dot):  # a hidden file, or one without an ending: no part of a sample
            continue
        part = images if ending in _IMAGES else labels.get(ending)
        if part is None:
            continue
        if key in part:
            raise ValueError(f"{key} is there twice: {part[key].name} and {member.name}")
        most = _MOST_BYTES.get(ending, _MOST_IMAGE_BYTES)
        if not 0 < member.length <= most:
            raise ValueError(f"{member.name} has {member.length:,} bytes; it must have 1 to {most:,}")
        part[key] = member
    if without := [key for key in images if key not in labels[_CLASS] and key not in labels[_JSON]]:
        raise ValueError(f"{without[0]} has no label, neither a .cls nor a .json{_and_others(without)}")
    if without := [key for key in (*labels[_CLASS], *labels[_JSON]) if key not in images]:
        raise ValueError(f"{without[0]} has a label and no image{_and_others(without)}")
    found = []
    for key, image in images.items():
        member = labels[_CLASS].get(key) or labels[_JSON][key]
        label = _label(member, os.pread(descriptor, member.length, member.offset))
        if not 0 <= label < num_classes:
            raise ValueError(
                f"{key} has the label {label}; those of {num_classes:,} classes are 0 to {num_classes - 1:,}"
            )
        found.append((key, image, label))
    return found


def _and_others(keys: list[str]) -> str:
    return f" (and so for {len(keys) - 1:,} more)" if len(keys) > 1 else ""


def _label(member: Member, content: bytes) -> int:
    """Return the class number in a .cls, or under "label" in a .json. Raises ValueError where there is none."""
    try:
        text = content.decode()
        value = json.loads(text)["label"] if member.name.lower().endswith(_JSON) else whole_number(text.strip())
    except (ValueError, RecursionError):  # no UTF-8, no JSON
        value = None
    except (KeyError, TypeError, IndexError):
        raise ValueError(f'{member.name} is no JSON object with a "label"') from None
    if type(value) is not int:
        raise ValueError(f"{member.name} holds no number of a class")
    return value


def read(shard: Path) -> ShardIndex:
    """Return the index beside a shard. Raises UsageError, with what to type, where it is damaged or of another shard.

    Raises FileNotFoundError where there is none.
    """
    todo = f"type `{PROGRAM} index {shard}`"
    path = path_of(shard)
    try:
        content = plain_file.read_bytes(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"cannot read the index {path}: {error.strerror}") from None
    index = _parsed(content)
    if index is None:
        raise UsageError(f"the index {path} is damaged: {todo}")
    try:
        with plain_file.opened(shard) as file:
            identity = Identity.of(file.fileno())
    except OSError as error:
        raise UsageError(f"cannot read the shard {shard}: {error.strerror}") from None
    if identity != index.identity:
        parts = ("size", "time of change", "first header")
        wrong = next(part for part, one, two in zip(parts, identity, index.identity, strict=True) if one != two)
        raise UsageError(f"the shard {shard} has another {wrong} than when its index was made: {todo}")
    return index


def _parsed(content: bytes) -> ShardIndex | None:
    """Return the index in a file, or None where it is none or does not fit the shard that it says it is of."""
    body = content[:-_DIGEST]
    if len(body) < _HEADER.size or content[-_DIGEST:] != blake2b(body, digest_size=_DIGEST).digest():
        return None
    kind, size, changed, begin, count, num_bytes = _HEADER.unpack_from(body)
    if kind != _KIND or size >= 2**62 or len(body) != _HEADER.size + 4 * 8 * count + num_bytes:
        return None
    numbers = np.frombuffer(body, "<i8", 4 * count, _HEADER.size).astype(np.int64).reshape(4, count)
    offsets, lengths, labels, key_ends = numbers
    keys = body[len(body) - num_bytes :]
    index = ShardIndex(Identity(size, changed, begin), offsets, lengths, labels, keys, key_ends)
    inside = (index.offsets >= 0) & (index.lengths > 0) & (index.lengths <= np.minimum(size, _MOST_IMAGE_BYTES))
    inside &= (index.offsets <= size - index.lengths) & (index.labels >= 0) & (index.labels < _MOST_CLASSES)
    ends = np.concatenate([[0], index.key_ends])
    are_keys = bool((np.diff(ends) >= 0).all()) and ends[-1] == num_bytes
    return index if inside.all() and are_keys else None
