"""Flat tensors to send in place of Python values, gradients and a whole training state."""

import io
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from hvd_train.errors import TYPES

_NOTHING = torch.zeros(1, dtype=torch.uint8)


# Horovod's own functions for objects are slow: for a state of 200 MB they took 15 s, in which no other thread ran.
def packed(value: Any) -> Tensor:
    """Pickle a value into a flat uint8 tensor; besides torch's types it may hold `errors.TYPES`."""
    if value is None:
        return _NOTHING  # ranks send this to wait for one another
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def unpacked(payload: Tensor) -> Any:
    """Return the value in the `payload` of `packed`, without running code from it.

    Raises: pickle.UnpicklingError: if it holds other types.
    """
    if payload.numel() == _NOTHING.numel():
        return None
    # Not torch's context manager: it would change the list for all threads.
    torch.serialization.add_safe_globals(list(TYPES))
    return torch.load(io.BytesIO(payload.numpy().data), weights_only=True)


# Horovod passes a length as an int: of 4.2 GiB in one broadcast 0.2 GiB arrive, and it reports success. Gloo's timeout
# is for a whole message, so on a slow link a long one would count as a lost rank.
MOST_BYTES = 4 << 20
"""The most that one operation sends. Agreeing on a shorter piece takes longer than sending it."""


class Piece:
    """Some bytes of one tensor, or several small tensors together, that one operation sends."""

    def __init__(self, parts: list[Tensor]) -> None:
        self._parts = parts  # flat views of bytes, in memory of their owners
        self.num_bytes = sum(part.numel() for part in parts)
        self._is_in_place = len(parts) == 1 and parts[0].device.type == "cpu"

    def outgoing(self) -> Tensor:
        """Return the bytes to send, uint8 in host memory: the tensor's own memory if possible."""
        return self._parts[0] if self._is_in_place else torch.cat([part.cpu() for part in self._parts])

    def room(self) -> Tensor:
        """Return the memory to receive into, uint8 on the host: the tensor's own memory if possible."""
        return self._parts[0] if self._is_in_place else torch.empty(self.num_bytes, dtype=torch.uint8)

    def arrived(self, room: Tensor) -> None:
        """Copy the received bytes from `room` into the tensors."""
        if not self._is_in_place:
            lengths = [part.numel() for part in self._parts]
            for part, received in zip(self._parts, torch.split(room, lengths), strict=True):
                part.copy_(received)


def pieces(tensors: Iterable[Tensor], most_bytes: int = MOST_BYTES) -> Iterator[Piece]:
    """Yield the bytes of dense tensors in pieces of at most `most_bytes`.

    Tensors of the same shapes, types and orders in memory give the same pieces.
    """
    parts, num_bytes = list[Tensor](), 0
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        for part in torch.split(as_it_lies(tensor.detach()).view(torch.uint8), most_bytes):
            if parts and num_bytes + part.numel() > most_bytes:
                yield Piece(parts)
                parts, num_bytes = [], 0
            parts.append(part)
            num_bytes += part.numel()
    if parts:
        yield Piece(parts)


def has_no_gaps(tensor: Tensor) -> bool:
    """Return whether a tensor is dense in memory, in any order of dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def as_it_lies(tensor: Tensor) -> Tensor:
    """Return a dense tensor as a flat view in its order in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
