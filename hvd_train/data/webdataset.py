"""Data sets of images in tar shards, as WebDataset lays them out, read at the places that their indexes tell."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from typing_extensions import override

from hvd_train import plain_file
from hvd_train.console import PROGRAM
from hvd_train.data import shard_index, views
from hvd_train.data.dataset import DataSet
from hvd_train.data.encoded import EncodedImages, Look, Texts
from hvd_train.data.shard_index import ShardIndex
from hvd_train.errors import UsageError
from hvd_train.settings.data import DataConfig

_MOST_OPEN = 128  # shards that a process has open at a time: a usual limit is 1,024 files


class ShardImages(EncodedImages):
    """The images of one split in shards, one shard after the other."""

    def __init__(self, shards: Sequence[Path], indexes: Sequence[ShardIndex], look: Look) -> None:
        def joined(name: str) -> torch.Tensor:
            return torch.from_numpy(np.concatenate([getattr(index, name) for index in indexes]))

        super().__init__(joined("labels"), look)
        self._offsets, self._lengths = joined("offsets"), joined("lengths")
        before = np.cumsum([0, *(len(index.keys) for index in indexes)])
        ends = np.concatenate([index.key_ends + start for index, start in zip(indexes, before, strict=False)])
        self._keys = Texts(b"".join(index.keys for index in indexes), torch.from_numpy(ends))
        self._starts = np.cumsum([0, *map(len, indexes)])[:-1].tolist()
        self._shards, self._identities = tuple(shards), tuple(index.identity[:2] for index in indexes)
        self._open: OrderedDict[int, BinaryIO] = OrderedDict()

    @override
    def name(self, index: int) -> str:
        return f"{os.fsdecode(self._keys[index])} in {self._shards[self._shard(index)]}"

    @override
    def read(self, index: int) -> bytes:
        """Return the content of an image's file.

        Raises OSError, and UsageError where the shard is another one by now.
        """
        length = int(self._lengths[index])
        content = os.pread(self._descriptor(self._shard(index)), length, int(self._offsets[index]))
        if len(content) < length:
            raise OSError("the shard has become shorter")
        return content

    def __getstate__(self) -> dict[str, Any]:
        """Return what a loader process gets: open files stay here."""
        return {**self.__dict__, "_open": OrderedDict()}

    def _shard(self, index: int) -> int:
        # Of shards without images, which begin where the next one does, the last one is found.
        return bisect_right(self._starts, index) - 1

    def _descriptor(self, shard: int) -> int:
        """Return the descriptor of a shard, opened before or now. The one not used for longest is closed for it."""
        if shard in self._open:
            self._open.move_to_end(shard)
            return self._open[shard].fileno()
        file = plain_file.opened(self._shards[shard])
        status = os.fstat(file.fileno())
        if (status.st_size, status.st_mtime_ns) != self._identities[shard]:
            file.close()
            raise UsageError(
                f"the shard {self._shards[shard]} has changed since the training has begun: type `{PROGRAM} index "
                f"{self._shards[shard]}`, and start it again"
            )
        if len(self._open) == _MOST_OPEN:
            self._open.popitem(last=False)[1].close()
        self._open[shard] = file
        return file.fileno()


def open_shards(root: Path, config: DataConfig) -> DataSet:
    """Return the data set of the shards in the folder `root`: those of train, val and, if there are any, test.

    Raises UsageError where shards, images or an index are missing, and where an index does not fit its shard.
    """
    found = shard_index.find(root)
    for split in ("train", "val"):
        if not found[split]:
            packed = next(root.rglob("*.tar.*z*"), None) or next(root.rglob("*.tgz"), None)
            hint = f"; those that are compressed, as {packed.name}, must be unpacked to .tar" if packed else ""
            raise UsageError(f"{root} has no {split}/*.tar and no {split}-*.tar{hint}")
    names = shard_index.class_names(found["train"][0].parent)
    indexes = {split: _indexes(root, shards) for split, shards in found.items()}
    labels = [index.labels for of_split in indexes.values() for index in of_split if len(index)]
    classes = names or tuple(map(str, range(max((int(of_shard.max()) for of_shard in labels), default=-1) + 1)))
    for split, shards in found.items():
        for shard, index in zip(shards, indexes[split], strict=True):
            _check_labels(shard, index, len(classes))
        if shards and not any(map(len, indexes[split])):
            raise UsageError(f"{root}: its {split} shards hold no images")
    train = ShardImages(found["train"], indexes["train"], views.of_training(config))
    val, test = (
        ShardImages(found[split], indexes[split], views.of_evaluation(config)) if found[split] else None
        for split in ("val", "test")
    )
    return views.data_set(config, classes, train, val, test)


def _indexes(root: Path, shards: Sequence[Path]) -> list[ShardIndex]:
    without = [shard for shard in shards if not shard_index.path_of(shard).exists()]
    if without:
        have = f"and {len(without) - 1:,} more have" if len(without) > 1 else "has"
        raise UsageError(f"the shard {without[0]} {have} no index: type `{PROGRAM} index {root}` once")
    return [shard_index.read(shard) for shard in shards]


def _check_labels(shard: Path, index: ShardIndex, num_classes: int) -> None:
    if len(index) and int(index.labels.max()) >= num_classes:
        worst = int(index.labels.argmax())
        raise UsageError(
            f"the shard {shard} cannot be used: {index.key(worst)} has the label {int(index.labels[worst])}; those of "
            f"{num_classes:,} classes are 0 to {num_classes - 1:,}"
        )
