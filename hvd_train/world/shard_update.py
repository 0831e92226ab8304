"""The update of one shard of the weights, which another rank can finish if the rank that has begun it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from hvd_train.world.host_memory import fence
from hvd_train.world.step_in_c import MOMENTUM, Parts


@dataclass(frozen=True)
class Shard:
    """What is in common memory of one shard."""

    word: NDArray[np.int64]
    """[1]: how far its update is (`update_word`)."""
    log: Tensor
    """Where numbers are kept while they are updated."""
    sums: Tensor
    """A place for each element: the sum of its gradients over the ranks."""


class ShardUpdate(Protocol):
    """Updates a shard piece by piece. Each is kept in the log meanwhile, so that it can be brought back."""

    num_pieces: int

    def take(self, step: int, factor: float | None) -> None:
        """Update what is left of the shard in this step, by `factor` times the sums: all, unless another began it."""


class UpdateByChunks(ShardUpdate):
    """Updates chunk by chunk, by an optimizer of torch's for each."""

    def __init__(self, shard: Shard, chunks: Sequence[ChunkUpdate]) -> None:
        self._shard, self.chunks = shard, chunks
        self.num_pieces = len(chunks)

    def take(self, step: int, factor: float | None) -> None:
        """Update the chunks that are left."""
        word, log = self._shard.word, self._shard.log
        number, is_open = _left_to_do(word, step)
        if is_open:
            self.chunks[number].restore(log)
        for following in range(number, len(self.chunks)):
            self.chunks[following].keep(log)
            fence()
            word[0] = update_word(step, following) | 1
            fence()
            self.chunks[following].update(factor)
            fence()
            word[0] = update_word(step, following + 1)
        word[0] = update_word(step, len(self.chunks))


class ChunkUpdate:
    """Some of the weights, which are updated together."""

    def __init__(
        self,
        optimizer: Optimizer,
        groups: Sequence[dict[str, Any]],
        changing: Sequence[Tensor],
        steps: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        """`groups` are those of the whole optimizer, `changing` all numbers that an update changes.

        `steps` are the optimizer's numbers of steps, beside those of the whole parameters.
        """
        self._optimizer, self._groups, self._changing = optimizer, groups, changing
        self._sizes = [numbers.numel() for numbers in changing]
        self._steps = [own for own, _ in steps], [whole for _, whole in steps]
        parts = [part for group in optimizer.param_groups for part in group["params"]]
        self._gradients = [(part, part.grad) for part in parts]

    def keep(self, log: Tensor) -> None:
        """Copy all that an update changes into the log."""
        torch.cat(list(self._changing), out=log[: sum(self._sizes)])

    def restore(self, log: Tensor) -> None:
        """Bring back what `keep` has copied."""
        torch._foreach_copy_(list(self._changing), torch.split(log[: sum(self._sizes)], self._sizes))

    def update(self, factor: float | None) -> None:
        """Update the weights by `factor` times the sum of their gradients, which stays as it is."""
        for own, whole in zip(self._optimizer.param_groups, self._groups, strict=True):
            own.update({name: value for name, value in whole.items() if name != "params"})
        if self._steps[0]:
            torch._foreach_copy_(*self._steps)
        for part, gradient in self._gradients:
            part.grad = gradient if factor is None else gradient * factor
        self._optimizer.step()


class DescentInC(ShardUpdate):
    """Takes steps of SGD, block by block, in C: a block is so small that its log costs next to nothing."""

    def __init__(
        self,
        shard: Shard,
        parts: Parts,
        groups: Sequence[Mapping[str, Any]],
        weights: Tensor,
        numbers: Mapping[str, Tensor],
    ) -> None:
        """`weights` and `numbers` have a place for each element; `groups` are those of the optimizer."""
        self._shard, self._parts, self._groups = shard, parts, groups
        self._rows = weights, numbers.get(MOMENTUM), shard.sums, shard.log
        self.num_pieces = parts.num_blocks

    def take(self, step: int, factor: float | None) -> None:
        """Update the blocks that are left."""
        word = self._shard.word
        begin = _left_to_do(word, step)
        self._parts.descend(word, update_word(step, 0), begin, self._groups, factor, self._rows)


def update_word(step: int, done: int) -> int:
    """Return in one word how far an update is: the step, and the pieces that are done. Plus 1, the next is begun."""
    return step << 32 | done << 1


def _left_to_do(word: NDArray[np.int64], step: int) -> tuple[int, bool]:
    """Return the first piece that is left to do in this step, and whether it is in the log, begun by an ended rank."""
    value = int(word[0])
    return ((value & 0xFFFFFFFF) >> 1, bool(value & 1)) if value >> 32 == step else (0, False)
