"""Fetch the shards of later batches while the present ones train."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol

from hvd_train.progress.order import Batch, Indices

_THREADS = 4  # of a rank


class Fetches(Protocol):
    """A data set whose samples lie in parts that are fetched as a whole."""

    def shards_of(self, samples: Indices, /) -> Indices:
        """Return the part of each sample."""

    def fetch(self, shard: int, /) -> None:
        """Fetch a part."""


class ReadAhead:
    """Fetches the shards of a rank's batches, up to a number of batches ahead.

    An error is left to the process that reads the shard.
    """

    def __init__(self, data: Fetches, work: Iterator[Batch], num_batches: int) -> None:
        self._data = data
        self._may_look = threading.Semaphore(num_batches)  # at another batch
        self._has_ended = False
        self._lock = threading.Lock()
        self._shards = self._new_shards(work)
        for _ in range(_THREADS):
            threading.Thread(target=self._run, name="read-ahead", daemon=True).start()

    def advance(self) -> None:
        """Look at one batch more: another one is being trained."""
        self._may_look.release()

    def stop(self) -> None:
        """Begin no further fetch."""
        self._has_ended = True
        self._may_look.release()

    def _new_shards(self, work: Iterator[Batch]) -> Iterator[int]:
        seen = set[int]()
        for batch in work:
            self._may_look.acquire()
            if self._has_ended:
                return
            for micro in batch.passes:
                new = {*self._data.shards_of(micro.samples).tolist()} - seen
                seen |= new
                yield from sorted(new)

    def _run(self) -> None:
        while not self._has_ended:
            with self._lock:
                shard = next(self._shards, None)
            if shard is None:
                return
            with suppress(Exception):
                self._data.fetch(shard)
