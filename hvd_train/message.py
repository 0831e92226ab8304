"""What ranks sum in a step besides the gradients, in one row of numbers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hvd_train.world.world import World


@dataclass(frozen=True)
class Votes:
    """The votes of one rank at the end of a step; one decides for all."""

    stop: bool = False  # end the training, with a commit
    commit: bool = False  # write a checkpoint
    change: bool = False  # continue in another world
    seconds: float = 0.0  # of training so far; only rank 0 says so


class Fields(NamedTuple):
    """The places of the parts of a message."""

    measures: slice  # sums of the measures, at first of the loss
    votes: slice  # [3]: stop, commit, change; above 0 if a rank votes for it
    other_buffers: slice  # [1]: above 0 if micro-batch 0 changed a buffer that is not averaged
    seconds: slice  # [1]: of training so far
    trained: slice  # [16]: the bits of a digest of the trained parameters
    samples: slice  # [8]: the fingerprint of the samples; [0] without a ledger
    times: slice  # [ranks * pace.FIELDS] of each rank if `Pace.is_due`; else [0]
    changes: slice  # of buffers: all other numbers


@cache
def fields(measures: int, samples: int, times: int) -> Fields:
    """Return the fields of a message with this many numbers in these three."""
    ends = [*itertools.accumulate((measures, 3, 1, 1, 16, samples, times))]
    return Fields(*map(slice, [0, *ends], [*ends, None]))


class Message:
    """The message of an update, which is summed over all ranks while gradients are."""

    def __init__(
        self,
        world: World,
        measures: Tensor,
        votes: Votes,
        has_changed_other_buffers: bool,
        trained: Sequence[float],
        samples: Sequence[float],
        times: Sequence[Tensor],
        changes: Sequence[Tensor],
    ) -> None:
        """Start the sum of what `Fields` explains. Raises RankLost.

        `measures` are [num_measures] or, for exact sums, [micro-batches, num_measures]; `times`
        are one, or none.
        """
        of_host = (
            *(votes.stop, votes.commit, votes.change),
            has_changed_other_buffers,
            votes.seconds,
            *trained,
            *samples,
        )
        parts = [measures if measures.ndim == 1 else measures.flatten()]
        is_sent = world.place.size > 1
        if is_sent:
            numbers = torch.from_numpy(np.array(of_host, np.float32))
            parts += [numbers.to(measures.device, non_blocking=True), *times]
        parts += changes
        # a message of another length needs another name: ranks negotiate each once
        name = "step with times" if times else "step"
        self._rows = None if measures.ndim == 1 else measures.shape
        if self._rows is not None:
            name = f"{name}, {len(measures)} micro-batches"
        self.at = fields(measures.shape[-1], len(samples), sum(map(len, times)))
        """The fields of the sum and `of_host`."""
        self.of_host = () if is_sent else of_host
        """What a rank alone leaves in host memory, behind the numbers before `changes`."""
        self.changes = self.at.changes.start - len(self.of_host)
        """Where the changes of buffers begin in the sum."""
        # A tensor of its own: the sum over the ranks is written into it.
        self._pending = world.start_sum(torch.cat(parts) if len(parts) > 1 else parts[0], name)
        self._sum: Tensor | None = None  # once it has arrived

    def sum(self) -> Tensor:
        """Return the sum over all ranks. Raises RankLost."""
        if self._sum is None:
            self._sum = self._pending()
            if self._rows is not None:  # added in the order of micro-batches
                rows = self._sum[: self._rows.numel()].view(self._rows)
                self._sum = torch.cat([rows.sum(0), self._sum[self._rows.numel() :]])
        return self._sum
