"""A client of the key-value server that Horovod's launcher runs for its ranks. No torch."""

from __future__ import annotations

import http.client
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from hvd_train.launch import signature

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy is for addresses outside the cluster
_MOST_BYTES = 1 << 20
_WAIT = "Horovod-Wait"  # for how many seconds the server may wait for what is not there yet; it takes at most 30
ADDRESS, PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"


def get(environ: Mapping[str, str], path: str, timeout_s: float | None = None, wait_s: int = 0) -> str:
    """Return what the server has under `path` ("SCOPE/KEY"); some answers come only when the server has one to give.

    Where nothing is there yet, the server waits `wait_s` seconds for it before it refuses, at most 30.
    Raises OSError where the server does not answer within `timeout_s` seconds (None: wait for ever), or where the
    answer is garbled or not signed by this job, and HTTPError, an OSError with a `code`, where it refuses.
    """
    return _request(environ, path, None, timeout_s, wait_s)


def put(environ: Mapping[str, str], path: str, text: str, timeout_s: float | None = None) -> None:
    """Write `text` under `path` on the server. Raises OSError as `get` does."""
    _request(environ, path, text.encode(), timeout_s)


def hold(environ: Mapping[str, str], path: str, timeout_s: float) -> socket.socket:
    """Return a connection over which `path` was asked for, and whose answer nobody needs: it lives as the process does.

    Raises OSError where the server does not take it within `timeout_s` seconds.
    """
    signed = signature.headers(environ, "GET", f"/{path}")
    lines = [f"GET /{path} HTTP/1.0", *(f"{name}: {value}" for name, value in signed.items()), ""]
    connection = socket.create_connection((environ[ADDRESS], int(environ[PORT])), timeout_s)
    connection.sendall("".join(f"{line}\r\n" for line in lines).encode())
    return connection


def _request(
    environ: Mapping[str, str], path: str, data: bytes | None, timeout_s: float | None, wait_s: int = 0
) -> str:
    url, method = f"http://{environ[ADDRESS]}:{environ[PORT]}/{path}", "GET" if data is None else "PUT"
    sent = signature.headers(environ, method, f"/{path}", data or b"")
    lines = sent | {_WAIT: str(wait_s)} if wait_s else sent
    request = urllib.request.Request(url, data, lines, method=method)  # http, as the line above says
    try:
        try:
            with _DIRECT.open(request, timeout=timeout_s) as answer:
                body = _signed_body(environ, sent, answer)
        except urllib.error.HTTPError as error:
            _signed_body(environ, sent, error)
            raise
        text: str = body.decode()
    except (http.client.HTTPException, ValueError) as error:  # no HTTP, cut short, or not UTF-8
        raise ConnectionError(f"the answer from {environ[ADDRESS]}:{environ[PORT]} is garbled ({error!r})") from error
    return text


def _signed_body(environ: Mapping[str, str], sent: Mapping[str, str], answer: Any) -> bytes:
    """Return the body of an answer to the request with the header lines `sent`.

    Raises ConnectionError where the store of this job has not signed it: whoever listens there is not to be believed.
    """
    body: bytes = answer.read(_MOST_BYTES)
    if len(body) != int(answer.headers.get("Content-Length", len(body))):
        raise http.client.IncompleteRead(body)
    if not signature.is_answer(environ, sent, answer.status, dict(answer.headers), body):
        raise ConnectionError(f"the answer from {environ[ADDRESS]}:{environ[PORT]} is not signed by this job")
    return body
