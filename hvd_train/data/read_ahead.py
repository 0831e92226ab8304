"""Fetch the shards of later batches while the present ones train."""

import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

from hvd_train.console import say
from hvd_train.launch import launcher
from hvd_train.progress.order import Batch

if TYPE_CHECKING:
    from hvd_train.data.shards import Shards

_THREADS = 4  # of a rank


class ReadAhead:
    """Fetches the shards of a rank's batches, up to a number of batches ahead, as far as there is
    room for them and for those in use.

    An error is left to the process that reads the shard.
    """

    def __init__(
        self, data: "Shards", work: Iterator[Batch], num_batches: int, num_ranks: int = 1
    ) -> None:
        """`num_ranks` are the ranks of this host, which share the room."""
        self._data = data
        self._work = work
        self._num_ranks = num_ranks
        self._changed = threading.Condition()
        self._may_look = num_batches  # at another batch, this often
        self._is_end = False  # whether all batches were looked at
        self._num_read = 0  # of the batches that were looked at
        self._batches = deque[set[int]]()  # the shards of batches that were looked at
        self._uses = Counter[int]()  # the number of these batches that a shard is in
        self._missing = dict[int, None]()  # shards to fetch, in the order of their use
        self._has_ended = False
        for _ in range(_THREADS):
            threading.Thread(target=self._run, name="read-ahead", daemon=True).start()

    def advance(self) -> None:
        """Look at one batch more: another one is being trained."""
        with self._changed:
            self._may_look += 1
            self._num_read += 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Begin no further fetch."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _run(self) -> None:
        with suppress(OSError):  # of the folder of copies, which its readers need, too
            while (shard := self._next()) is not None:
                with suppress(Exception):
                    self._data.fetch(shard)

    def _next(self) -> int | None:
        """Return the next shard to fetch, once there is room for it; None if there is none."""
        while True:
            with self._changed:
                if self._has_ended or (self._is_end and not self._batches):
                    return None
                if self._may_look and not self._is_end:
                    self._look()
                elif self._num_read and self._batches:
                    self._drop()
                elif (shard := next(iter(self._missing), None)) is not None and self._fits(shard):
                    del self._missing[shard]
                    return shard
                else:
                    self._changed.wait()

    def _look(self) -> None:
        """Look at another batch."""
        self._may_look -= 1
        if (batch := next(self._work, None)) is None:
            self._is_end = True
            self._changed.notify_all()
            return
        shards = set()
        for micro in batch.passes:
            shards |= {*self._data.shards_of(micro.samples).tolist()}
        self._missing |= dict.fromkeys(sorted(shards - self._uses.keys()))
        self._uses.update(shards)
        self._batches.append(shards)

    def _drop(self) -> None:
        """Forget the batch that was read."""
        self._num_read -= 1
        for shard in self._batches.popleft():
            self._missing.pop(shard, None)  # its reader has fetched it
            self._uses[shard] -= 1
            if not self._uses[shard]:
                del self._uses[shard]
                self._data.release(shard)

    def _fits(self, shard: int) -> bool:
        """Return whether a shard fits with those that were fetched and will be used."""
        others = self._uses.keys() - self._missing.keys()
        if self._data.have_room({shard, *others}, self._num_ranks):
            return True
        if shard in self._batches[0]:
            _warn()
        return False


@cache
def _warn() -> None:
    """Say once that shards are fetched repeatedly."""
    if launcher.prints():
        say(
            "--cache-size is less than the shards that --shuffle-window reads at once, so they are "
            "fetched repeatedly: type a larger cache, a smaller window, or --cache-size 0, which "
            "reads samples alone"
        )
