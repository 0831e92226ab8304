"""Send the user's objects to loader processes, which do not run the user's script again."""

import hashlib
import io
import os
import pickle
import re
import warnings
from collections import ChainMap
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from hvd_train.data.random_numbers import seed_all

_LARGE = 2**20  # bytes: a smaller array is copied sooner than its file is found
# span, access, offset, device, inode and path
_MAPPING = re.compile(r"(\w+)-(\w+) .(.).(.) (\w+) \S+ \d+ +(/.*)")
# the path of a file, how it is opened, and the offset and number of bytes
_Mapped = tuple[str, str, int, int]


def _mapped(address: int, num_bytes: int) -> _Mapped | None:
    """Return the part of a file that this memory shows, if another process that
    maps the file sees the same.
    """
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
        for found in map(_MAPPING.match, lines):
            if found is None or not int(found[1], 16) <= address <= int(found[2], 16) - num_bytes:
                continue
            path = found[6]
            writes = found[3] == "w"
            # what was written is in this process alone
            if not os.path.isfile(path) or (writes and found[4] != "s"):
                return None
            return (
                path,
                "r+" if writes else "r",
                int(found[5], 16) + address - int(found[1], 16),
                num_bytes,
            )
    return None


def _by_file(array: np.ndarray) -> tuple[Any, ...] | None:
    """Reduce a large array in a memory-mapped file to its place there."""
    if array.nbytes < _LARGE:
        return None
    reach = [(count - 1) * stride for count, stride in zip(array.shape, array.strides, strict=True)]
    before = sum(-each for each in reach if each < 0)
    num_bytes = before + sum(each for each in reach if each > 0) + array.itemsize
    part = _mapped(array.__array_interface__["data"][0] - before, num_bytes)
    return part and (_array_in, (part, array.shape, array.dtype, before, array.strides))


def _array_in(part: _Mapped, shape: Any, dtype: Any, first: int, strides: Any) -> np.ndarray:
    path, mode, offset, num_bytes = part
    # a str is no Literal
    content = np.memmap(path, np.uint8, mode, offset, num_bytes)  # type: ignore[call-overload]
    found: np.ndarray = np.ndarray(shape, dtype, content, first, strides)
    return found


def _array(array: np.ndarray) -> Any:
    return _by_file(array) or array.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _tensor(tensor: Tensor) -> Any:
    with suppress(RuntimeError, TypeError):  # numpy has no such tensor
        if reduced := _by_file(tensor.numpy()):
            return _tensor_in, reduced[1]
    return ForkingPickler._extra_reducers[Tensor](tensor)  # type: ignore[attr-defined]


def _tensor_in(*place: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(_array_in(*place))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Pickles what a script or a function defines by value, and shares the memory
    of tensors as torch does.
    """

    dispatch_table: ClassVar[Any] = ChainMap(
        {np.ndarray: _array, np.memmap: _array, Tensor: _tensor},
        cloudpickle.Pickler.dispatch_table,
        ForkingPickler._extra_reducers,  # type: ignore[attr-defined]
    )


class ByValue:
    """Becomes `thing` in the process that it is sent to, where modules are imported
    with the same seed as here.
    """

    def __init__(self, thing: Any, seed: int) -> None:
        self._thing = thing
        self._seed = seed

    def __reduce__(self) -> tuple[Any, tuple[bytes, int]]:
        content = io.BytesIO()
        _Pickler(content).dump(self._thing)
        return _received, (content.getvalue(), self._seed)


def _received(content: bytes, seed: int) -> Any:
    seed_all(seed)
    return pickle.loads(content)  # noqa: S301  # it comes from this process's parent


def _place(tensor: Tensor) -> tuple[Any, tuple[str]]:
    is_shared = tensor.is_shared()  # type: ignore[no-untyped-call]
    where = tensor.data_ptr(), is_shared, tensor.shape, tensor.stride(), tensor.dtype
    return str, (repr(where),)


class _Places(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles where tensors and mapped files are in place of their values:
    processes share their memory.
    """

    dispatch_table: ClassVar[Any] = ChainMap(
        {np.ndarray: _array, np.memmap: _array, Tensor: _place},
        cloudpickle.Pickler.dispatch_table,
    )


class _Hash:
    """A file whose content is only hashed: a data set may fill half of the memory."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self.write = self._hash.update

    def __str__(self) -> str:
        return self._hash.hexdigest()


def digest_of_pickle(thing: Any) -> str | None:
    """Return a digest that changes if `thing` must be sent again; None if that cannot be known."""
    file = _Hash()
    try:
        _Places(file).dump(thing)
    except Exception:  # noqa: BLE001  # it may raise anything, for instance for an open file
        return None
    return str(file)
