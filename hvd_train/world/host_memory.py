"""Memory that processes of one host have in common, and locks by which each knows which of the others live."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Address = tuple[int, int]
"""The process that has made some memory, and the number of the open file there."""

_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux, fcntl(2): type, whence, start, length, process


class HostMemory:
    """Memory without a name in any folder: however the processes end that have mapped it, nothing stays behind.

    It is a file of its own kind (memfd_create(2)), which `/proc` opens for processes of the same user alone. Its size
    is not limited by that of /dev/shm, which is 64 MB in a container.
    """

    def __init__(self, file: int, num_bytes: int) -> None:
        # One open file for as long as this object lives: to close another one would give up the locks.
        self._file = file
        self._map = mmap.mmap(file, num_bytes)

    @staticmethod
    def made(num_bytes: int) -> tuple[HostMemory, Address]:
        """Return new memory full of zeros, and the address by which other processes open it. Raises OSError."""
        file = os.memfd_create("hvd_train")
        os.ftruncate(file, num_bytes)
        return HostMemory(file, num_bytes), (os.getpid(), file)

    @staticmethod
    def opened(address: Address, num_bytes: int) -> HostMemory:
        """Return the memory that another process of this host has made. Raises OSError where it may not be had."""
        process, number = address
        return HostMemory(os.open(f"/proc/{process}/fd/{number}", os.O_RDWR), num_bytes)

    def numbers(self, begin: int, count: int) -> Tensor:
        """Return `count` float32 numbers from byte `begin` on."""
        return torch.frombuffer(self._map, dtype=torch.float32, count=count, offset=begin)

    def words(self, begin: int, rows: int, columns: int, dtype: type[Any]) -> NDArray[Any]:
        """Return words of 8 bytes from byte `begin` on, [rows, columns]."""
        return np.frombuffer(self._map, dtype, rows * columns, begin).reshape(rows, columns)

    def lock(self, number: int) -> bool:
        """Take lock `number` if no living process has it, and return whether this one has it now.

        It is given back when this process ends, in whatever way.
        """
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        return True

    def holder(self, number: int) -> int | None:
        """Return the process that has lock `number`, or None."""
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)
        kind, *_, process = struct.unpack(_FLOCK, fcntl.fcntl(self._file, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else process

    def unlock(self, number: int) -> None:
        """Give lock `number` back."""
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, number)

    def __del__(self) -> None:
        """Close the file; the memory itself lives as long as numbers of it are in use."""
        if hasattr(self, "_file"):
            os.close(self._file)


_fence = threading.Lock()


def fence() -> None:
    """Have all that this thread has read and written before seen as done before what follows.

    Some processors (ARM) let others see it in another order. To give a lock back and to take one is ordered on all.
    """
    for _ in range(2):
        with _fence:
            pass


def host_identity() -> tuple[str, ...]:
    """Return what two processes have in common that may have common memory: kernel, process numbers and user."""
    return (
        Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        os.readlink("/proc/self/ns/pid"),
        os.readlink("/proc/self/ns/user"),
        str(os.geteuid()),
    )
