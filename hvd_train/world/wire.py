"""Flat tensors to send in place of Python values, gradients and a whole training state."""

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hvd_train.errors import TYPES


# Horovod's own functions for objects are slow: for a state of 200 MB they took 15 s, in which no
# other thread ran.
def packed(value: Any) -> Tensor:
    """Pickle a value into a flat uint8 tensor; besides torch's types it may hold `errors.TYPES`."""
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def unpacked(payload: Tensor) -> Any:
    """Return the value in the `payload` of `packed`, without running code from it.

    Raises: pickle.UnpicklingError: if it holds other types.
    """
    # Not torch's context manager: it would change the list for all threads.
    torch.serialization.add_safe_globals(list(TYPES))
    return torch.load(io.BytesIO(payload.numpy().data), weights_only=True)


# Horovod passes a length as an int: of 4.2 GiB in one broadcast 0.2 GiB arrive, and it reports
# success. Gloo's timeout is for a whole message, so on a slow link a long one would count as a lost
# rank.
MOST_BYTES = 4 << 20
"""The most that one operation sends. Agreeing on a shorter piece takes longer than sending it."""


def pieces(tensors: Iterable[Tensor], most_bytes: int = MOST_BYTES) -> Iterator[list[Tensor]]:
    """Yield the bytes of dense tensors as flat views, in lists that one operation
    sends: of at most `most_bytes`.

    Tensors of the same shapes, types and orders in memory give the same pieces.
    """
    parts = list[Tensor]()
    num_bytes = 0
    for tensor in tensors:
        for part in torch.split(
            tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8), most_bytes
        ):
            if parts and num_bytes + part.numel() > most_bytes:
                yield parts
                parts = []
                num_bytes = 0
            parts.append(part)
            num_bytes += part.numel()
    if num_bytes:
        yield parts


def outgoing(piece: Sequence[Tensor]) -> Tensor:
    """Return the bytes of a piece, uint8 in host memory."""
    return torch.cat([part.cpu() for part in piece])


def arrived(piece: Sequence[Tensor], payload: Tensor) -> None:
    """Copy the `outgoing` bytes of another rank into a piece."""
    for part, received in zip(
        piece, torch.split(payload, [len(part) for part in piece]), strict=True
    ):
        part.copy_(received)


def has_no_gaps(tensor: Tensor) -> bool:
    """Return whether a tensor is dense in memory, in any order of dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
