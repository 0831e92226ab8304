"""The one place that reads pickles: between a program and the ranks that it has started, of one account. No torch.

A pickle runs code where it is read. So these files are read only where nobody but this account could have written them.
"""

from __future__ import annotations

import errno
import os
import pickle
import stat
from collections import ChainMap
from multiprocessing import reduction
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle


def write(path: Path, value: object) -> None:
    """Write a value, functions and classes of notebook cells included, into a file that this account alone can read.

    The file is whole or absent. Raises OSError where it cannot be written, and whatever a value raises that cannot be
    pickled.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        with open(partial, "xb", opener=_to_write) as file:
            cloudpickle.dump(value, file)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read(path: Path) -> Any:
    """Return the value that `write` has written.

    Raises OSError where there is none, or where another account owns the file or may read or write it, and whatever
    the making of the value raises.
    """
    with open(path, "rb", opener=_to_read) as file:
        return pickle.load(file)  # noqa: S301  # of this account, as `_to_read` has seen


def send_by_value() -> None:
    """Let this process send what notebook cells define to its loader processes, which could not import it."""
    reduction.dump = _dump


class _ByValue(cloudpickle.Pickler):  # type: ignore[misc]  # it ships no types
    """Pickles what cells define as cloudpickle does, and queues and shared tensors as multiprocessing does."""

    dispatch_table: ClassVar[Any] = ChainMap(
        reduction.ForkingPickler._extra_reducers,  # type: ignore[attr-defined]
        cloudpickle.Pickler.dispatch_table,
    )


def _dump(obj: Any, file: Any, protocol: int | None = None) -> None:
    _ByValue(file, protocol).dump(obj)


def _to_write(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _to_read(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EPERM, "it is no file of this account alone, so it is not read", path)
