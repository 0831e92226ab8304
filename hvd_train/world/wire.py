"""What is sent in place of Python values, gradients and a whole training state: flat tensors."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from hvd_train import travel

_NOTHING = torch.zeros(1, dtype=torch.uint8)


# Horovod's own functions for objects make a Python number of every byte: for a state of 200 MB they took 15 s, in which
# nothing else of the process ran.
def packed(value: Any) -> Tensor:
    """Return a value as a tensor of bytes, uint8 of one dimension.

    It may hold numbers, texts, tensors on the CPU, lists, dictionaries and the like, and the types of `travel`.
    """
    if value is None:
        return _NOTHING  # what ranks send to wait for one another, as fast as they can
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def unpacked(payload: Tensor) -> Any:
    """Return the value that `packed` has made `payload` of, which lies on the CPU.

    No code is run that the payload names. Raises pickle.UnpicklingError where it holds anything else than it may.
    """
    if payload.numel() == _NOTHING.numel():
        return None
    # For the whole process, and for good: the list that torch has for a block alone is one for all threads.
    torch.serialization.add_safe_globals(list(travel.TYPES))
    return torch.load(io.BytesIO(payload.numpy().data), weights_only=True)


# Horovod hands a length to Gloo and MPI as an int: of 4.2 GiB in one broadcast 0.2 GiB arrive, and it reports success.
# And Gloo's time limit is for a whole message: on a slow link only a short one is not taken for a lost rank.
MOST_BYTES = 4 << 20
"""The most that one operation carries. A shorter piece takes longer to agree on than to send over a fast link."""


class Piece:
    """Some bytes of one tensor, or several small tensors together, as they travel in one operation."""

    def __init__(self, parts: list[Tensor]) -> None:
        self._parts = parts  # flat views of bytes, in memory of their owners
        self.num_bytes = sum(part.numel() for part in parts)

    @property
    def _is_sent_from_its_place(self) -> bool:
        return len(self._parts) == 1 and self._parts[0].device.type == "cpu"

    def outgoing(self) -> Tensor:
        """Return the bytes to send, uint8 in host memory: the tensor's own memory where one tensor has them all."""
        return self._parts[0] if self._is_sent_from_its_place else torch.cat([part.cpu() for part in self._parts])

    def room(self) -> Tensor:
        """Return the memory to receive into, uint8 on the host: the tensor's own memory if that is possible."""
        return self._parts[0] if self._is_sent_from_its_place else torch.empty(self.num_bytes, dtype=torch.uint8)

    def arrived(self, room: Tensor) -> None:
        """Put what has arrived in `room` where it belongs."""
        if not self._is_sent_from_its_place:
            for part, received in zip(
                self._parts, torch.split(room, [part.numel() for part in self._parts]), strict=True
            ):
                part.copy_(received)


def pieces(tensors: Iterable[Tensor], most_bytes: int = MOST_BYTES) -> Iterator[Piece]:
    """Yield the bytes of tensors in their order, each tensor's as they lie in memory, in pieces of at most so many.

    A tensor has no gaps in memory, in whatever order of dimensions. On ranks whose tensors have the same shapes, types
    and orders in memory the pieces are the same.
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
        sent, _ = self._cast.compress(as_it_lies(tensor))
        return sent, tensor

    def decompress(self, tensor: Tensor, ctx: Tensor) -> Tensor:
        """Write what has arrived into the gradient `ctx`, in its own type, and return that."""
        # Fresh memory for the sum of a large gradient would take longer than the cast.
        if tensor.data_ptr() != ctx.data_ptr():
            as_it_lies(ctx).copy_(tensor)
        return ctx


def has_no_gaps(tensor: Tensor) -> bool:
    """Return whether the numbers of a tensor fill the memory in which it lies, in whatever order of dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def as_it_lies(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor without gaps in memory as they lie there: a view of one dimension."""
    return tensor.as_strided((tensor.numel(),), (1,))
