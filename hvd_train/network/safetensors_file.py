"""Plain weights as safetensors: names and tensors, which other programs read without torch and without running code."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from hvd_train import plain_file
from hvd_train.errors import UsageError

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}


def check_library(flag: str) -> None:
    """Raise UsageError, which begins with `flag`, where the library that reads these files is missing."""
    try:
        import safetensors.torch  # noqa: F401
    except ImportError as error:
        raise UsageError(f"{flag} needs {error.name}: pip install safetensors") from None


def read(path: Path) -> dict[str, Tensor]:
    """Return the tensors in a file, on the CPU; they are read when they are used.

    Raises OSError where the file cannot be opened, ValueError where it is damaged, and UsageError without the library.
    """
    check_library(str(path))
    from safetensors import SafetensorError, safe_open

    with plain_file.opened(path) as file:
        try:
            # By the number of the file that is open: its path may lead to a pipe a moment later.
            with safe_open(f"/proc/self/fd/{file.fileno()}", framework="pt") as tensors:
                return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118  # it is no dict
        except SafetensorError as error:
            raise ValueError(str(error).partition("\n")[0]) from None


def why_not(tensors: Mapping[str, object]) -> str:
    """Return why these values cannot be in such a file, in a few words; empty where they can."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            return f"{name} is no tensor"
        if tensor.layout != torch.strided or tensor.dtype not in _TYPES:
            kind = tensor.dtype if tensor.layout == torch.strided else tensor.layout
            return f"{name} is of {str(kind).removeprefix('torch.')}, for which safetensors has no type"
    return "a tensor is called __metadata__" if "__metadata__" in tensors else ""


def write(file: BinaryIO, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors into an open file, each without a copy of all; those that share memory are written once each.

    The library writes files under names of its own, which nothing forces to disk, and refuses tensors that share
    memory, as tied weights do. Raises OSError where the disk does not take it, or where `why_not` says why.
    """
    if reason := why_not(tensors):
        raise OSError(errno.EINVAL, reason)
    header, end = dict[str, object](), 0
    # The widest types first, as the library has them: so each tensor is aligned when the file is mapped.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        if tensors[name].numel():
            file.write(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
