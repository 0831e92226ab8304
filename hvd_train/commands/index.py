"""`hvd-train index`: make the indexes of tar shards, by which training finds each image in them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from hvd_train.console import PROGRAM, say, show
from hvd_train.errors import UsageError
from hvd_train.flags import parse_flags
from hvd_train.help_page import Page, page_of

USAGE = """\
  index DATA...            make the indexes of tar shards, for --data webdataset
"""
_AT_ONCE = 8  # shards: threads wait for the disk or the network, and there is little to compute
_SAY_AFTER_S = 5.0


@dataclass(frozen=True)
class IndexOptions:
    """Make the index of each tar shard, beside it: where each image is, and its class. Shards stay as they are.

    One that has an index which fits is passed over, so that the same command goes on where it was stopped.
    """

    data: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders as for --data webdataset, or single shards."""


def run(arguments: list[str]) -> int:
    """Make the indexes and return 0.

    Raises UsageError where there are no shards, and, once all others have theirs, where a shard cannot be used.
    """
    options = parse_flags(IndexOptions, arguments, f"{PROGRAM} index")
    if not options.data:
        raise UsageError(f"index needs the folder of the shards: type `{PROGRAM} index DATA`")
    shards = _shards(options.data)
    refused: list[UsageError] = []
    samples, said = 0, time.monotonic()
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        try:
            for number, answer in enumerate(threads.map(_index, shards), 1):
                if isinstance(answer, UsageError):
                    refused.append(answer)
                    say(str(answer))
                else:
                    samples += answer
                if time.monotonic() - said > _SAY_AFTER_S:
                    say(f"{number:,} of {len(shards):,} shards are indexed, {samples:,} images")
                    said = time.monotonic()
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    if refused:
        raise UsageError(f"{len(refused):,} of {len(shards):,} shards have no index: mend or remove them")
    show(f"{len(shards):,} shards with {samples:,} images are indexed")
    return 0


def page(arguments: list[str]) -> Page:
    """Return the help."""
    return page_of(
        IndexOptions, "index DATA...", (f"{PROGRAM} index DATA", f"{PROGRAM} index DATA/train/*.tar"), "DATA"
    )


def _shards(named: Sequence[Path]) -> list[Path]:
    """Return the shards that are named, and those of each folder. Raises UsageError where there are none."""
    from hvd_train.data import shard_index  # imports numpy

    found: dict[Path, None] = {}
    for path in named:
        if not path.is_dir():
            found[path] = None
            continue
        inside = [shard for shards in shard_index.find(path).values() for shard in shards] or sorted(path.glob("*.tar"))
        if not inside:
            raise UsageError(f"{path} holds no shards: neither *.tar, nor those of --data webdataset")
        found.update(dict.fromkeys(inside))
    return [*found]


def _index(shard: Path) -> int | UsageError:
    """Make the index of a shard where it has none that fits; return the number of its images, or why that cannot be."""
    from hvd_train.data import shard_index
    from hvd_train.run_files import durable

    with suppress(UsageError, FileNotFoundError):
        return len(shard_index.read(shard))
    try:
        index = shard_index.scan(shard)
        durable.write(shard_index.path_of(shard), index.in_bytes())
    except UsageError as error:
        return error
    except OSError as error:
        return UsageError(f"cannot write the index {shard_index.path_of(shard)}: {error.strerror}")
    return len(index)
