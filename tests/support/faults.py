"""Faults for tests: malicious pickles, a full disk, a wrong program at the port of
a store, refused settings.
"""

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from unittest.mock import patch


class Malicious:
    """Makes the folder `owned` if it is unpickled without care."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, ("owned",)


def full_disk(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def no_room() -> Iterator[None]:
    """Let this process create files, but write no further byte into them."""
    fits = os.write

    def write(file: int, data: bytes) -> int:
        # pipes of Python's own
        return fits(file, data) if os.fstat(file).st_nlink == 0 else full_disk()

    with patch("os.write", write), patch("os.fsync", full_disk):
        yield


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Give one answer to the first client of a port of the loopback, and yield the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield str(server.getsockname()[1])
