"""What a rank does with its shard of the weights, in C (`shard_step.c`): the same bits as torch's operators have."""

from __future__ import annotations

import ctypes
import itertools
import math
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import SGD, Optimizer

_PART = np.dtype([("begin", np.int64), ("end", np.int64), ("group", np.int64), ("form", np.int64)])
_SETTINGS = np.dtype([("decay", np.float32), ("momentum", np.float32), ("rate", np.float32), ("nesterov", np.int32)])
_VECTORS = (4, 8, 16, 32, 64)  # numbers of a vector register
_TRIED_SIZES = (7, 15, 31, 63, 127, 1037, 1039)  # of weights: with whole vectors and rests of every kind of vector
MOMENTUM = "momentum_buffer"
"""How torch's SGD names its momenta."""

Build = Callable[[list[dict[str, Any]]], Optimizer]
"""Makes an optimizer of one kind for groups of parameters."""


@dataclass(frozen=True)
class Rounding:
    """How torch's SGD rounds on this processor: a form of `shard_step.c` for whole vectors, and one for the rest."""

    vector: int
    """How many numbers a vector has."""
    form: int
    form_of_rest: int

    def parts(self, begin: int, end: int, size: int) -> list[tuple[int, int, int]]:
        """Return elements `begin` to `end` of a parameter of `size` elements cut by their form: begins, ends, forms."""
        rest = min(max(size - size % self.vector, begin), end)
        cut = [(begin, rest, self.form), (rest, end, self.form_of_rest)]
        return [(first, last, form) for first, last, form in cut if first < last]


class Parts:
    """Elements of parameters that are summed or updated together, as the functions in C take them."""

    def __init__(self, parts: Sequence[tuple[int, int, int, int]]) -> None:
        """Each has its first element, the one after its last, the number of its group, and its form."""
        self._parts = np.array(list(parts), dtype=_PART)

    @property
    def num_blocks(self) -> int:
        """How many blocks `descend` takes them in."""
        sizes = self._parts["end"] - self._parts["begin"]
        return int((-(-sizes // _loaded().shard_block())).sum())

    def sum(self, own: Sequence[Tensor], rows: Sequence[Tensor], rank: int, place: int) -> float:
        """Add up gradients in the order of ranks, and return the 2-norm of the sums.

        `own` are those of `rank`, flat, part by part. Those of the others lie in `rows`; row `place` takes the sums.
        """
        starts = np.array([gradient.data_ptr() for gradient in own], np.int64)
        of_ranks = np.array([row.data_ptr() for row in rows], np.int64)
        squares: float = _loaded().shard_sum(
            *self._pointer_and_number, of_ranks.ctypes.data, len(rows), rank, place, starts.ctypes.data
        )
        return math.sqrt(squares)

    def descend(
        self,
        word: NDArray[np.int64],
        step: int,
        begin: tuple[int, bool],
        groups: Sequence[Mapping[str, Any]],
        factor: float | None,
        rows: tuple[Tensor, Tensor | None, Tensor, Tensor],
    ) -> None:
        """Take a step of SGD with the settings of `groups` by `factor` times the sums; None is 1.

        `rows` are weights, momenta, sums, and a log. `word` [1] tells how far it is: `step`, plus twice the number of
        blocks that are done, plus 1 where the next one is in the log. `begin` says the same of the blocks that are done
        already.
        """
        settings = np.zeros(len(groups), _SETTINGS)
        for place, group in enumerate(groups):
            settings[place] = group["weight_decay"], group["momentum"], group["lr"], group["nesterov"]
        scale = None if factor is None else np.array([factor], np.float32)
        _loaded().shard_sgd(
            word.ctypes.data,
            step,
            *begin,
            *self._pointer_and_number,
            settings.ctypes.data,
            None if scale is None else scale.ctypes.data,
            *(None if row is None else row.data_ptr() for row in rows),
        )

    @property
    def _pointer_and_number(self) -> tuple[int, int]:
        return self._parts.ctypes.data, len(self._parts)


def is_available() -> bool:
    """Return whether the functions in C serve here: they were compiled, and torch has one thread, as they have."""
    return _library() is not None and torch.get_num_threads() == 1


def rounding_of(optimizer: Optimizer, build: Build) -> Rounding | None:
    """Return how an optimizer rounds, or None where its steps cannot be taken in C.

    It is SGD that does. How it rounds is found by trial, on weights of several sizes.
    """
    if not (is_available() and isinstance(optimizer, SGD)):
        return None
    found = {_rounding_of(group, build) for group in optimizer.param_groups}
    return found.pop() if len(found) == 1 else None


def _rounding_of(group: Mapping[str, Any], build: Build) -> Rounding | None:
    # Large rates: with small ones all ways to round come to the same weights. Of 0 there is no product to round.
    large = {"lr": 0.7, "momentum": group["momentum"] and 0.9, "weight_decay": group["weight_decay"] and 0.3}
    if group["maximize"] or group["differentiable"]:
        return None
    group = {**group, **large}
    steps = [_trial(group, build, size) for size in _TRIED_SIZES]
    forms = range(_loaded().shard_forms())
    for tried in itertools.starmap(Rounding, itertools.product(_VECTORS, forms, forms)):
        if all(_is_step_of(tried, group, *step) for step in steps):
            return tried
    return None


def _trial(group: Mapping[str, Any], build: Build, size: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return weights, momenta and gradients of a step, and weights and momenta after it."""
    generator = torch.Generator().manual_seed(size)
    before = [torch.randn(size, generator=generator) for _ in range(3)]
    weights, momenta, gradients = (numbers.clone() for numbers in before)
    optimizer = build([{**group, "params": [weights]}])
    weights.grad = gradients
    if group["momentum"]:
        optimizer.state[weights][MOMENTUM] = momenta
    optimizer.step()
    return before, [weights, momenta]


def _is_step_of(rounding: Rounding, group: Mapping[str, Any], before: list[Tensor], after: list[Tensor]) -> bool:
    weights, momenta, gradients = (numbers.clone() for numbers in before)
    parts = Parts([(begin, end, 0, form) for begin, end, form in rounding.parts(0, len(weights), len(weights))])
    word, log = np.zeros(1, np.int64), torch.empty(2 * len(weights))
    parts.descend(word, 0, (0, False), [group], None, (weights, momenta if group["momentum"] else None, gradients, log))
    return torch.equal(weights, after[0]) and torch.equal(momenta, after[1])


def _loaded() -> ctypes.CDLL:
    library = _library()
    assert library is not None
    return library


@cache
def _library() -> ctypes.CDLL | None:
    """Return the functions in C, or None where they were not compiled, or for another machine or version."""
    compiled = Path(__file__).with_name("shard_step" + str(sysconfig.get_config_var("EXT_SUFFIX")))
    try:
        return load(compiled)
    except (OSError, AttributeError):
        return None


def load(compiled: Path) -> ctypes.CDLL:
    """Return the functions of `shard_step.c` from the file that it was compiled into."""
    library = ctypes.CDLL(str(compiled))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.shard_sum.argtypes = [pointer, number, pointer, number, number, number, pointer]
    library.shard_sum.restype = ctypes.c_double
    library.shard_sgd.argtypes = [pointer, number, number, ctypes.c_int, pointer, number, *[pointer] * 6]
    library.shard_sgd.restype = None
    return library
