"""What is sent in place of Python values, gradients and a whole training state: flat tensors."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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

    def room(self, *, apart: bool = False) -> Tensor:
        """Return the memory to receive into, uint8 on the host: the tensor's own where that is possible.

        With `apart` it is always other memory.
        """
        if self._is_sent_from_its_place and not apart:
            return self._parts[0]
        return torch.empty(self.num_bytes, dtype=torch.uint8)

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


class GroupCompression(Protocol):
    """How the gradients of a group are sent: in the order in which their numbers lie in memory.

    Horovod takes contiguous tensors only, and gradients of a model in `channels_last` are not.
    """

    def compress(self, gradients: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Any]]:
        """Return what is sent in place of `gradients`, and for each tensor that `decompress` is given what it needs."""

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """Write what has arrived as `tensor` into the gradients that `ctx` knows, and return the first of them."""


class OneByOne:
    """Sends each gradient from its own memory, into which the sum comes."""

    def compress(self, gradients: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return the gradients, flat, and the gradients themselves."""
        return [as_it_lies(gradient) for gradient in gradients], gradients

    def decompress(self, tensor: Tensor, ctx: Tensor) -> Tensor:
        """Return the gradient `ctx`, which the sum is in."""
        return ctx


class Together:
    """Sends the gradients of a group in one piece of memory, in another number format than their own.

    On a GPU each operator costs time, and so does each tensor on which the ranks have to agree.
    """

    def __init__(self, dtype: torch.dtype, *, as_one: bool = True) -> None:
        """With `as_one` what is sent is one tensor, and else as many as there are gradients."""
        self._as_one = as_one
        self._dtype = dtype

    def compress(self, gradients: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[_Cast]]:
        """Return the gradients' numbers, cast, and what leads back to the gradients."""
        flat = [as_it_lies(gradient) for gradient in gradients]
        sizes = [len(numbers) for numbers in flat]
        whole = torch.empty(sum(sizes), dtype=self._dtype, device=flat[0].device)
        parts = torch.split(whole, sizes)
        torch._foreach_copy_(parts, flat)
        return [whole] if self._as_one else parts, [_Cast(gradients[0], flat, parts)]

    def decompress(self, tensor: Tensor, ctx: _Cast) -> Tensor:
        """Write what has arrived, all of it, into the gradients, and return the first of them."""
        torch._foreach_copy_(ctx.gradients, ctx.parts)
        return ctx.first


@dataclass(frozen=True)
class _Cast:
    """Gradients that travel together: the first one, all of them as they lie in memory, and what is sent for each."""

    first: Tensor
    gradients: list[Tensor]
    parts: tuple[Tensor, ...]


def has_no_gaps(tensor: Tensor) -> bool:
    """Return whether the numbers of a tensor fill the memory in which it lies, in whatever order of dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def as_it_lies(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor without gaps in memory as they lie there: a view of one dimension."""
    return tensor.as_strided((tensor.numel(),), (1,))
