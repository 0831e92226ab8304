"""Read and write the key-value store of Horovod's launcher.

No torch. Horovod signs requests with this process's key, and checks answers
(horovod/runner/http/http_client.py).
"""

import socket
from collections.abc import Mapping
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from urllib.error import HTTPError, URLError

ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
KEY = "HOROVOD_RENDEZVOUS_KEY"
LOOPBACK = "127.0.0.1"
UNSIGNED = "is not signed by this job"
"""In the error for an answer by another key."""


def get(
    environ: Mapping[str, str], path: str, timeout_s: float | None = None, text: str = ""
) -> str:
    """Return the text under `path` ("SCOPE/KEY"), or "" if there is none; the
    store may delay its answer, which may depend on the `text` sent with the request.

    Raises OSError after `timeout_s` seconds (None: never), for an answer that is not signed with
    the job's key, or if the store refuses.
    """
    return _request(environ, "GET", path, text, timeout_s)


def put(environ: Mapping[str, str], path: str, text: str, timeout_s: float | None = None) -> None:
    """Write `text` under `path` in the store. Raises OSError as `get` does."""
    _request(environ, "PUT", path, text, timeout_s)


def _request(
    environ: Mapping[str, str], method: str, path: str, text: str, timeout_s: float | None
) -> str:
    from horovod.runner.http import http_client  # a host that only starts containers may lack it

    store = f"{environ[ADDRESS]}:{environ[PORT]}"
    try:
        answer: bytes = http_client.request(
            method, environ[ADDRESS], environ[PORT], f"/{path}", text.encode(), timeout_s
        )
    except HTTPError as refusal:
        if refusal.code == HTTPStatus.NOT_FOUND:
            return ""
        raise ConnectionError(f"{store} refuses {method} {path} ({refusal.code})") from refusal
    except URLError as error:
        raise ConnectionError(str(error.reason)) from error
    except HTTPException as error:
        raise ConnectionError(f"the answer from {store} is garbled ({error!r})") from error
    return answer.decode()


class HeldRequest:
    """A request whose answer the store holds back, while bytes go to and fro from time to time."""

    def __init__(self, environ: Mapping[str, str], path: str, timeout_s: float) -> None:
        """Send the request. Raises OSError, as `beat` does."""
        from horovod.runner.http import signature

        headers = signature.headers(environ[KEY], "GET", f"/{path}", b"")
        self._key = environ[KEY]
        self._nonce = headers[signature.NONCE]
        self._connection = HTTPConnection(environ[ADDRESS], int(environ[PORT]), timeout_s)
        self._connection.request("GET", f"/{path}", headers=headers)
        self._is_held = False

    def beat(self) -> str | None:
        """Send a byte if the answer is held back; return the answer, or
        None if only a byte has come.
        """
        from horovod.runner.http import signature

        connection = self._connection.sock
        if self._is_held:
            connection.sendall(b".")
        if connection.recv(1, socket.MSG_PEEK) == b".":
            connection.recv(1)
            self._is_held = True
            return None
        try:
            answer = self._connection.getresponse()
            body = answer.read(signature.MOST_BYTES)
        except HTTPException as error:
            raise ConnectionError(f"the answer is garbled ({error!r})") from error
        expected = signature.of_answer(self._key, self._nonce, answer.status, body)
        if not signature.is_equal(answer.headers.get(signature.SIGNATURE, ""), expected):
            raise ConnectionError(f"the answer {UNSIGNED}")
        return body.decode()
