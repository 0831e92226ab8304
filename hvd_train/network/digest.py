"""A fast digest of tensors, to compare the states of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor


def digest_of(facts: str, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a digest, of 32 hexadecimal digits, of `facts` and of tensors with their names, types and shapes.

    It does not depend on the order of `tensors`, on the device, or on how a tensor lies in memory (`channels_last`).
    Against errors it is as good as any of 128 bits; it is not made to withstand somebody who looks for two states with
    the same digest.
    """
    fingerprint = xxhash.xxh3_128(facts.encode())
    for name, tensor in sorted(tensors, key=lambda named: named[0]):
        fingerprint.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        # Numbers are put into the order of dimensions where they lie: a GPU does it in no time.
        values = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
        fingerprint.update(values.numpy().data)  # other threads, such as the heartbeat's, run meanwhile
    return fingerprint.hexdigest()


def tensors_in(values: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested mappings and sequences, each with the keys and places that lead to it."""
    if isinstance(values, Tensor):
        yield name, values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield from tensors_in(value, f"{name}/{key}")
    elif isinstance(values, (list, tuple)):
        for place, value in enumerate(values):
            yield from tensors_in(value, f"{name}/{place}")
