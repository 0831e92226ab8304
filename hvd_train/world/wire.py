"""What is sent in place of Python values and gradients: one flat tensor for each."""

from __future__ import annotations

import pickle
from typing import Any, Protocol

import torch
from torch import Tensor


# Horovod's own functions for objects make a Python number of every byte: for a state of 200 MB they took 15 s, in which
# nothing else of the process ran.
def packed(value: Any) -> Tensor:
    """Return a value that can be pickled as a tensor of bytes, uint8 of shape [length of the pickle]."""
    return torch.frombuffer(bytearray(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8)


def unpacked(payload: Tensor) -> Any:
    """Return the value that `packed` has made `payload` of, which lies on the CPU."""
    return pickle.loads(payload.numpy().data)  # noqa: S301  # from a rank of this job


class Compression(Protocol):
    """A compression of Horovod's, as `hvd.Compression.fp16`: how a gradient is sent."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return what is sent in place of `tensor`, and what `decompress` needs to know."""

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """Return the gradient that arrives as `tensor`."""


class InMemoryOrder:
    """A compression that sends a gradient's numbers in the order in which they lie in memory, cast by another one.

    Horovod takes contiguous tensors only, and gradients of a model in `channels_last` are not.
    """

    def __init__(self, cast: Compression) -> None:
        self._cast = cast

    def compress(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient `tensor`, flat and cast, and the gradient itself."""
        sent, _ = self._cast.compress(_as_it_lies(tensor))
        return sent, tensor

    def decompress(self, tensor: Tensor, ctx: Tensor) -> Tensor:
        """Write what has arrived into the gradient `ctx`, in its own type, and return that."""
        # Fresh memory for the sum of a large gradient would take longer than the cast.
        if tensor.data_ptr() != ctx.data_ptr():
            _as_it_lies(ctx).copy_(tensor)
        return ctx


def _as_it_lies(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))
