"""The update of a shard, in both ways: taken once in a step, and finished where it was left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hvd_train.world.shard_update import ChunkUpdate, DescentInC, Shard, ShardUpdate, UpdateByChunks, update_word
from hvd_train.world.step_in_c import MOMENTUM, Parts

SIZE, PIECE = 1300, 512  # weights; of a block in C
STEP = 7
Way = Callable[[Tensor, Tensor, Shard], ShardUpdate]


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """As a rank has whose steps are taken in C."""


def by_chunks(weights: Tensor, momenta: Tensor, shard: Shard) -> ShardUpdate:
    """Return the update of these weights by an optimizer of torch's for each chunk."""
    group: dict[str, Any] = {"lr": 0.5, "momentum": 0.5, "weight_decay": 0.0, "nesterov": False}
    chunks = []
    for begin in range(0, SIZE, PIECE):
        here = slice(begin, min(begin + PIECE, SIZE))
        part = weights[here]
        part.grad = shard.sums[here]
        optimizer = torch.optim.SGD([part], lr=1)
        optimizer.state[part][MOMENTUM] = momenta[here]
        chunks.append(ChunkUpdate(optimizer, [group], [part, momenta[here]], []))
    return UpdateByChunks(shard, chunks)


def in_c(weights: Tensor, momenta: Tensor, shard: Shard) -> ShardUpdate:
    """Return the update of these weights in C."""
    group: dict[str, Any] = {"lr": 0.5, "momentum": 0.5, "weight_decay": 0.0, "nesterov": False}
    return DescentInC(shard, Parts([(0, SIZE, 0, 0)]), [group], weights, {MOMENTUM: momenta})


def begun(way: Way) -> tuple[Tensor, Tensor, Shard, ShardUpdate]:
    """Return weights and momenta before a step, what is in common memory of them, and their update."""
    weights, momenta = torch.arange(float(SIZE)), torch.full((SIZE,), 2.0)
    shard = Shard(np.zeros(1, np.int64), torch.zeros(2 * SIZE), torch.ones(SIZE))
    return weights, momenta, shard, way(weights, momenta, shard)


@pytest.mark.parametrize("way", [by_chunks, in_c])
def test_a_step_is_taken_once(way: Way) -> None:
    """Whoever comes again in the same step finds nothing left to do; in the next step all of it."""
    weights, momenta, shard, update = begun(way)
    for _ in range(2):
        update.take(STEP, None)
        assert torch.equal(momenta, torch.full((SIZE,), 2.0))  # 0.5 * 2 + 1
        assert torch.equal(weights, torch.arange(float(SIZE)) - 1)
    assert shard.word.tolist() == [update_word(STEP, update.num_pieces)]
    update.take(STEP + 1, 0.0)
    assert torch.equal(momenta, torch.ones(SIZE))
    assert torch.equal(weights, torch.arange(float(SIZE)) - 1.5)


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("way", [by_chunks, in_c])
def test_what_is_left_is_done(way: Way, *, is_open: bool) -> None:
    """Pieces that are done stay as they are; one that was begun is brought back from the log, and done."""
    weights, momenta, shard, update = begun(way)
    shard.log[:PIECE], shard.log[PIECE : 2 * PIECE] = weights[PIECE : 2 * PIECE], momenta[PIECE : 2 * PIECE]
    weights[:PIECE] = -3.0
    if is_open:
        weights[PIECE : PIECE + 100] = momenta[PIECE : 2 * PIECE] = 1e9
    shard.word[0] = update_word(STEP, 1) + is_open
    update.take(STEP, None)
    assert torch.equal(weights[:PIECE], torch.full((PIECE,), -3.0))
    assert torch.equal(weights[PIECE:], torch.arange(float(SIZE))[PIECE:] - 1)
    assert torch.equal(momenta[PIECE:], torch.full((SIZE - PIECE,), 2.0))
    assert shard.word.tolist() == [update_word(STEP, update.num_pieces)]


def test_the_word_of_a_long_training() -> None:
    """Neither two billion steps nor a billion pieces run into one another, and they fit into a word."""
    last = update_word(2**31 - 1, 2**31 - 1) + 1
    assert last == np.int64(last)
    assert update_word(1, 2**31 - 1) + 1 < update_word(2, 0)
