"""The stand-in's calls of CUDA and NCCL from Python, without torch."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_void_p
from typing import Any

import numpy as np

CUDA = ctypes.CDLL(None)  # it has been preloaded
IN_PROGRESS = 7
FLOAT, HALF, LONG, BFLOAT = 7, 6, 4, 9
SUM, MAX, MEAN = 0, 2, 4
TYPES = {
    np.dtype(np.float32): FLOAT,
    np.dtype(np.float16): HALF,
    np.dtype(np.int64): LONG,
    np.dtype(np.uint16): BFLOAT,  # their bits: NumPy has no bfloat16
}


class CudaError(Exception):
    """A call failed; the argument is its error number."""


def cuda(name: str, *arguments: Any) -> None:
    """Call the runtime. Raises CudaError."""
    error = getattr(CUDA, name)(*arguments)
    if error:
        raise CudaError(error)


def new_stream() -> c_void_p:
    """A stream of the current device."""
    stream = c_void_p()
    cuda("cudaStreamCreate", byref(stream))
    return stream


def new_event() -> c_void_p:
    """An event that has not been recorded."""
    event = c_void_p()
    cuda("cudaEventCreate", byref(event))
    return event


class Memory:
    """Numbers on the current device, or pinned ones of the host."""

    def __init__(self, like: np.ndarray, *, pinned: bool = False) -> None:
        self.at, self.bytes = c_void_p(), like.nbytes
        self._like = like
        cuda("cudaMallocHost" if pinned else "cudaMalloc", byref(self.at), c_size_t(like.nbytes))
        if pinned:
            ctypes.memmove(self.at, like.ctypes.data, like.nbytes)

    @classmethod
    def holding(cls, values: np.ndarray) -> Memory:
        """New memory on the device with these numbers, that are there already."""
        memory = cls(values)
        cuda("cudaMemcpy", memory.at, c_void_p(values.ctypes.data), c_size_t(values.nbytes), c_int(1))
        cuda("cudaDeviceSynchronize")
        return memory

    def copy_from(self, other: Memory, stream: c_void_p) -> None:
        """Queue a copy on a stream."""
        cuda("cudaMemcpyAsync", self.at, other.at, c_size_t(self.bytes), c_int(4), stream)

    def values(self) -> np.ndarray:
        """What is there now: nothing is waited for."""
        result = np.empty_like(self._like)
        ctypes.memmove(result.ctypes.data, self.at, self.bytes)
        return result

    def free(self) -> None:
        """Give the memory back."""
        cuda("cudaFree", self.at)


class UniqueId(ctypes.Structure):
    """As in nccl.h."""

    _fields_ = (("internal", ctypes.c_char * 128),)


class Config(ctypes.Structure):
    """The beginning of ncclConfig_t, of which the stand-in reads `blocking`."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", c_int),
        ("others", ctypes.c_char * 200),
    )


class Communicator:
    """One rank of a communicator whose ranks have agreed on a name."""

    def __init__(self, name: str, size: int, rank: int, *, blocking: bool = True) -> None:
        self.handle = c_void_p()
        config = Config(blocking=int(blocking))
        identity = UniqueId(f"/fake_gpu-test-{name}".encode())
        self.result = CUDA.ncclCommInitRankConfig(byref(self.handle), size, identity, rank, byref(config))

    def all_reduce(self, memory: Memory, stream: c_void_p, operation: int = SUM) -> int:
        """Queue a sum into the same memory."""
        like = memory.values()
        kind = TYPES[like.dtype]
        return int(CUDA.ncclAllReduce(memory.at, memory.at, c_size_t(like.size), kind, operation, self.handle, stream))

    @property
    def error(self) -> int:
        """What ncclCommGetAsyncError says."""
        error = c_int()
        call = CUDA.ncclCommGetAsyncError(self.handle, byref(error))
        return error.value if call == 0 else -call

    def abort(self) -> int:
        """Give up."""
        return int(CUDA.ncclCommAbort(self.handle))

    def destroy(self) -> int:
        """End in peace."""
        return int(CUDA.ncclCommDestroy(self.handle))
