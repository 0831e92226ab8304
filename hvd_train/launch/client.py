"""A client of the key-value server that Horovod's launcher runs for its ranks. No torch."""

from __future__ import annotations

import http.client
import socket
import urllib.request
from collections.abc import Mapping

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy is for addresses outside the cluster
ADDRESS, PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"


def get(environ: Mapping[str, str], path: str, timeout_s: float | None = None) -> str:
    """Return what the server has under `path` ("SCOPE/KEY"); some answers come only when the server has one to give.

    Raises OSError where the server does not answer within `timeout_s` seconds (None: wait for ever) or where its answer
    is garbled, and HTTPError, an OSError with a `code`, where it refuses.
    """
    return _request(environ, path, None, timeout_s)


def put(environ: Mapping[str, str], path: str, text: str, timeout_s: float | None = None) -> None:
    """Write `text` under `path` on the server. Raises OSError as `get` does."""
    _request(environ, path, text.encode(), timeout_s)


def hold(environ: Mapping[str, str], path: str, timeout_s: float) -> socket.socket:
    """Return a connection over which `path` was asked for, and whose answer nobody needs: it lives as the process does.

    Raises OSError where the server does not take it within `timeout_s` seconds.
    """
    connection = socket.create_connection((environ[ADDRESS], int(environ[PORT])), timeout_s)
    connection.sendall(f"GET /{path} HTTP/1.0\r\n\r\n".encode())
    return connection


def _request(environ: Mapping[str, str], path: str, data: bytes | None, timeout_s: float | None) -> str:
    url = f"http://{environ[ADDRESS]}:{environ[PORT]}/{path}"
    request = urllib.request.Request(url, data, method="GET" if data is None else "PUT")  # http, as the line above says
    try:
        with _DIRECT.open(request, timeout=timeout_s) as answer:
            text: str = answer.read().decode()
    except (http.client.HTTPException, ValueError) as error:  # no HTTP, cut short, or not UTF-8
        raise ConnectionError(f"the answer from {environ[ADDRESS]}:{environ[PORT]} is garbled ({error!r})") from error
    return text
