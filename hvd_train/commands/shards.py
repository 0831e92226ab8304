"""`hvd-train write-shards` and `index`: make data sets in shards, and tables of tar files."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from hvd_train import plain_file
from hvd_train.console import say, show
from hvd_train.errors import UsageError, counted
from hvd_train.progress.clock import Timer
from hvd_train.run_files import durable

if TYPE_CHECKING:
    from hvd_train.data.shard_writers import ShardWriter

_STATE = ".hvd_train.json"
_LINES_S = 10.0  # between two lines of progress


def index(options: Namespace) -> int:
    """Write a table next to the tar files of each set at a URL, and return 0. Raises UsageError."""
    from hvd_train.data import shards  # slow to import

    for url in shards.urls_of_sets(options.url):
        show(shards.keep_table(url))
    return 0


def write_shards(options: Namespace) -> int:
    """Write a data set as shards, or what is missing of it, and return 0.

    Until all is written it lies in OUT.unfinished, so no training takes a part for the whole.
    Raises UsageError if the data cannot be read, or if the folder has other shards.
    """
    from hvd_train.data.shard_writers import digest_of_set, open_writer
    from hvd_train.data.shards import CLASSES
    from hvd_train.data.store import bytes_of
    from hvd_train.data.stored import open_stored  # slow to import, like the others

    if "://" in options.out:
        raise UsageError(f"{options.out}: name a folder, and copy it to the store when it is whole")
    out = Path(options.out).resolve()
    size = bytes_of(options.shard_size)
    data = open_stored(options.data)
    if data.test is not None:
        say("the test set is left out: shards have a training and a validation set")
    sets = {"val": data.val, "train": data.train}
    writers = {}
    made_of = {"--format": options.format, "--shard-size": f"{size:,}"}
    for name, source in sets.items():
        if source is not None:
            writer = writers[name] = open_writer(options.format, source, size)
            made_of[f"the {name} set"] = digest_of_set(source, writer)
    with _alone(out):
        folder = out if (out / _STATE).exists() else Path(f"{out}.unfinished")
        if folder != out and out.exists() and ([*out.iterdir()] or out.is_mount()):
            raise UsageError(f"{out} is there, and write-shards has not made it: name another")
        writing = _Writing(folder, size, made_of)
        for name, writer in writers.items():
            writing.write(name, sets[name], writer)
        if data.classes:
            durable.write_text(folder / CLASSES, "\n".join([*data.classes, ""]))
        folder.rename(out)
        durable.sync_folder(out.parent)
    show(f"{options.out}: {writing.described()}")
    return 0


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Let no other process make the folder meanwhile.

    Raises UsageError if one does, and for any OSError in the block.
    """
    lock = Path(f"{out}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock, timeout=0):
            try:
                yield
            finally:
                lock.unlink()
    except Timeout:
        raise UsageError(f"another process writes {out}: wait for it") from None
    except OSError as error:
        raise UsageError(f"{error.filename or out}: {error.strerror}") from None


class _Writing:
    """A folder of shards, and the samples and bytes of each, which a file there keeps."""

    def __init__(self, folder: Path, size: int, made_of: dict[str, str]) -> None:
        """`made_of` are options and data by name. Raises UsageError if the folder has others."""
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._size = size
        self._made_of = made_of
        self._shards: dict[str, list[list[int]]] = {}
        self._progress = Timer(_LINES_S, time.monotonic)
        path = folder / _STATE
        if path.exists():
            try:
                state = json.loads(plain_file.read_text(path))
                before = dict[str, str](state["made_of"])
                self._shards |= state["shards"]
            except (ValueError, KeyError, TypeError):
                raise UsageError(f"{path} is damaged: delete {folder}, or name another") from None
            for name in {**before, **made_of}:
                then = before.get(name, "none")
                now = made_of.get(name, "none")
                if now != then:
                    raise UsageError(
                        f"{folder} has shards of other options or data: {name} was {then}, now "
                        f"it is {now}: type the same command, or name another folder"
                    )
        self._save()

    def _save(self) -> None:
        state = {"made_of": self._made_of, "shards": self._shards}
        durable.write_text(self._folder / _STATE, json.dumps(state))

    def write(self, name: str, source: Any, writer: ShardWriter) -> None:
        """Write the missing shards of a set, and its index. Raises UsageError or OSError."""
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        shards = self._shards.setdefault(name, [])
        first = 0
        number = 0
        while first < len(source):
            path = folder / writer.name(number)
            known = shards[number] if number < len(shards) else None
            if known is None or not path.exists() or path.stat().st_size != known[1]:
                made = self._write_shard(path, writer, source, first, known)
                shards[number:] = [made, *shards[number + 1 :]]
                self._save()
            first += shards[number][0]
            number += 1
            if self._progress.comes():
                say(f"{folder}: {first:,} of {len(source):,} samples in {counted(number, 'shard')}")
        name, content = writer.index(folder, shards)
        durable.write(folder / name, content)

    def _write_shard(
        self, path: Path, writer: ShardWriter, source: Any, first: int, known: list[int] | None
    ) -> list[int]:
        """Write a shard that begins with sample `first`, and return its samples and bytes.

        It has one sample, or as many as fit. Raises UsageError if it is not the `known` one.
        """
        samples = list[bytes]()
        room = self._size
        for number in range(first, len(source)):
            sample = writer.sample(number, source)
            room -= len(sample)
            if samples and room < 0:
                break
            samples.append(sample)
        with durable.writing(path) as file:
            file.writelines(writer.shard(samples))
            made = [len(samples), file.tell()]
            if known not in (None, made):
                raise UsageError(f"{path} cannot be written again: the data has changed")
        return made

    def described(self) -> str:
        """Return how many samples and shards each set has."""
        return ", ".join(
            f"{name}: {counted(sum(n for n, _ in shards), 'sample')} in "
            f"{counted(len(shards), 'shard')}"
            for name, shards in self._shards.items()
        )
