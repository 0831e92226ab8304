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
from types import SimpleNamespace
from typing import Any, ClassVar

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from hvd_train.data.random_numbers import seed_all
from hvd_train.launch import stacks

_LARGE = 2**20  # bytes: a smaller array is copied sooner than its file is found
# first and last address, access, private or shared, offset and path
_MAPPING = re.compile(r"(\w+)-(\w+) r(.).(.) (\w+) \S+ \d+ +(/.*)")


def _in_file(array: np.ndarray) -> tuple[Any, ...] | None:
    """Return the place of a large array in a memory-mapped file, as `_array_in` takes it."""
    if array.nbytes < _LARGE:
        return None
    first, end = np.lib.array_utils.byte_bounds(array)
    part = _mapped(first, end)
    start = array.__array_interface__["data"][0] - first
    return part and (part, array.shape, array.dtype, start, array.strides)


def _array(array: np.ndarray) -> Any:
    if place := _in_file(array):
        return _array_in, place
    return array.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _tensor(tensor: Tensor) -> Any:
    with suppress(RuntimeError, TypeError):  # numpy has no such tensor
        if place := _in_file(tensor.numpy()):
            return _tensor_in, place
    return ForkingPickler._extra_reducers[Tensor](tensor)  # type: ignore[attr-defined]


def _tensor_in(*place: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(_array_in(*place))


def _mapped(first: int, end: int) -> tuple[Any, ...] | None:
    """Return which part of a file this memory shows, if another process that maps the
    file sees the same: its path, the mode to open it, the offset and number of bytes.
    """
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
        for found in filter(None, map(_MAPPING.match, lines)):
            begin = int(found[1], 16)
            if begin <= first and end <= int(found[2], 16):
                _, _, writes, sharing, offset, path = found.groups()
                # a private change, or a deleted file, is in this process alone
                if (writes == "w" and sharing == "p") or not os.path.isfile(path):
                    return None
                mode = "r+" if writes == "w" else "r"
                return path, mode, int(offset, 16) + first - begin, end - first
    return None


def _array_in(part: tuple[Any, ...], *layout: Any) -> np.ndarray:
    path, mode, offset, num_bytes = part
    shape, dtype, start, strides = layout
    content = np.memmap(path, np.uint8, mode, offset, num_bytes)
    found: np.ndarray = np.ndarray(shape, dtype, content, start, strides)
    return found


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
    stacks.register()  # a loader process begins with this
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


def digest_of_pickle(thing: Any) -> str | None:
    """Return a digest that changes if `thing` must be sent again; None if that cannot be known."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        # the pickle is not kept: a data set may fill half of the memory
        _Places(SimpleNamespace(write=digest.update)).dump(thing)
    except Exception:  # noqa: BLE001  # it may raise anything, for instance for an open file
        return None
    return digest.hexdigest()
