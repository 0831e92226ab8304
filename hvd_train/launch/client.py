"""Read and write the key-value store of Horovod's launcher. No torch, and no Horovod unless the job has a key.

Requests and answers are signed with that key (packaging/horovod_sources/horovod/runner/http/signature.py), since any
process on the network can reach the store's port.
"""

import http.client
import urllib.error
import urllib.request
from collections.abc import Mapping
from functools import cache
from typing import Any

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy is for addresses outside the cluster
_MOST_BYTES = 1 << 20
ADDRESS, PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
KEY = "HOROVOD_RENDEZVOUS_KEY"


def get(environ: Mapping[str, str], path: str, timeout_s: float | None = None) -> str:
    """Return the text under `path` ("SCOPE/KEY"); the store may delay its answer until it has one.

    Raises OSError after `timeout_s` seconds (None: never) or for an unsigned answer; HTTPError if the store refuses.
    """
    return _request(environ, path, None, timeout_s)


def put(environ: Mapping[str, str], path: str, text: str, timeout_s: float | None = None) -> None:
    """Write `text` under `path` in the store. Raises OSError as `get` does."""
    _request(environ, path, text.encode(), timeout_s)


def _request(environ: Mapping[str, str], path: str, data: bytes | None, timeout_s: float | None) -> str:
    url, method = f"http://{environ[ADDRESS]}:{environ[PORT]}/{path}", "GET" if data is None else "PUT"
    sent = headers(environ, method, f"/{path}", data or b"")
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


def headers(environ: Mapping[str, str], method: str, path: str, body: bytes = b"") -> dict[str, str]:
    """Return the header lines that sign a request for "/SCOPE/KEY"; none if the job has no key."""
    key = environ.get(KEY)
    if not key:
        return {}
    signed: dict[str, str] = _requester().headers(key, method, path, body)
    return signed


@cache
def _requester() -> Any:
    from horovod.runner.http import signature

    return signature.Requester()


def _signed_body(environ: Mapping[str, str], sent: Mapping[str, str], answer: Any) -> bytes:
    """Return the body of an answer to a request. Raises ConnectionError unless this job's store signed it."""
    body: bytes = answer.read(_MOST_BYTES)
    if len(body) != int(answer.headers.get("Content-Length", len(body))):
        raise http.client.IncompleteRead(body)
    if key := environ.get(KEY):
        from horovod.runner.http import signature

        expected = signature.of_answer(key, sent[signature.NONCE], answer.status, body)
        if not signature.is_equal(answer.headers.get(signature.SIGNATURE, ""), expected):
            raise ConnectionError(f"the answer from {environ[ADDRESS]}:{environ[PORT]} is not signed by this job")
    return body
