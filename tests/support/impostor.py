"""A program at the port of a job's store, with one answer to the first client."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Listen on the loopback during this block, and yield the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield str(server.getsockname()[1])
