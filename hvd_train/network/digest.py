"""Compute a fast digest of tensors, to compare the states of ranks. It detects errors, not attacks."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor


def digest_of(facts: str, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a digest of 32 hexadecimal digits. The tensors' order, device and memory format do not matter."""
    fingerprint = xxhash.xxh3_128(facts.encode())
    for name, tensor in sorted(tensors, key=lambda named: named[0]):
        fingerprint.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        values = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
        fingerprint.update(values.numpy().data)  # without the GIL: the heartbeat's thread runs meanwhile
    return fingerprint.hexdigest()


def tensors_in(values: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the path and value of each tensor in nested containers."""
    if isinstance(values, Tensor):
        yield name, values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield from tensors_in(value, f"{name}/{key}")
    elif isinstance(values, (list, tuple)):
        for place, value in enumerate(values):
            yield from tensors_in(value, f"{name}/{place}")
