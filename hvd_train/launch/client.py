"""A client of the key-value server that Horovod's launcher runs for its ranks. No torch."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from hvd_train.launch import signature

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy is for addresses outside the cluster
_MOST_BYTES = 1 << 20
ADDRESS, PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"


def get(environ: Mapping[str, str], path: str, timeout_s: float | None = None) -> str:
    """Return the value under `path` ("SCOPE/KEY"); the server may wait until it has one.

    Raises: OSError: if no answer comes within `timeout_s` seconds (None: wait for ever), or the answer is garbled or
    not signed by this job; HTTPError, an OSError with a `code`: if the server refuses.
    """
    return _request(environ, path, None, timeout_s)


def put(environ: Mapping[str, str], path: str, text: str, timeout_s: float | None = None) -> None:
    """Write `text` under `path` on the server. Raises OSError as `get` does."""
    _request(environ, path, text.encode(), timeout_s)


def _request(environ: Mapping[str, str], path: str, data: bytes | None, timeout_s: float | None) -> str:
    url, method = f"http://{environ[ADDRESS]}:{environ[PORT]}/{path}", "GET" if data is None else "PUT"
    sent = signature.headers(environ, method, f"/{path}", data or b"")
    request = urllib.request.Request(url, data, sent, method=method)
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

    Raises: ConnectionError: if the store of this job has not signed it.
    """
    body: bytes = answer.read(_MOST_BYTES)
    if len(body) != int(answer.headers.get("Content-Length", len(body))):
        raise http.client.IncompleteRead(body)
    if not signature.is_answer(environ, sent, answer.status, dict(answer.headers), body):
        raise ConnectionError(f"the answer from {environ[ADDRESS]}:{environ[PORT]} is not signed by this job")
    return body
