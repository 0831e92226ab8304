"""Sign the requests of ranks to the job's store, and its answers (HMAC-SHA-256).

The store is where ranks learn each other's addresses, and it listens on a network. The launcher and its ranks share a
key, which travels in their environments and is never sent. Each request has a nonce, and the answer is signed with it,
so neither can be sent again.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import itertools
import os
import secrets
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

KEY = "HOROVOD_RENDEZVOUS_KEY"
"""The environment variable with the job's key, which is never on a command line."""
NONCE, DIGEST, SIGNATURE = "Horovod-Nonce", "Horovod-Digest", "Horovod-Signature"
MOST_BYTES = 64 << 20
"""The longest body of a request. (The addresses of 1,024 ranks take 170 KB.)"""
_WINDOW = 1024
_numbers = itertools.count()


def make_key() -> str:
    """Return a new random key."""
    return secrets.token_hex(32)


def key_of_job() -> str:
    """Return the key of this process's job; empty if it has none, and then nothing is signed."""
    return os.environ.get(KEY, "")


def digest(body: bytes) -> str:
    """Return the SHA-256 of a body in hexadecimal digits."""
    return hashlib.sha256(body).hexdigest()


def of_request(key: str, method: str, path: str, nonce: str, digest_of_body: str) -> str:
    """Return the signature of a request, which the store checks before it reads the body."""
    return _signed(key, f"request\n{method}\n{path}\n{nonce}\n{digest_of_body}")


def of_answer(key: str, nonce: str, status: int, body: bytes) -> str:
    """Return the signature of the answer to the request with this nonce."""
    return _signed(key, f"answer\n{nonce}\n{int(status)}\n{digest(body)}")


def is_equal(one: str, other: str) -> bool:
    """Compare two signatures in constant time."""
    return hmac.compare_digest(one.encode(), other.encode())


def _signed(key: str, message: str) -> str:
    return hmac.new(key.encode(), message.encode(), hashlib.sha256).hexdigest()


def headers(key: str, method: str, path: str, body: bytes) -> dict[str, str]:
    """Return the header lines that sign a request of this process; none without a key."""
    if not key:
        return {}
    nonce = f"{_name_of_process(os.getpid())}-{next(_numbers)}"
    return {NONCE: nonce, DIGEST: digest(body), SIGNATURE: of_request(key, method, path, nonce, digest(body))}


@functools.cache
def _name_of_process(pid: int) -> str:  # a fork has another
    return secrets.token_hex(16)


class Seen:
    """The requests that the store has accepted, so that none is accepted twice.

    Each process numbers its requests; the store remembers which of the last 1,024 numbers have arrived.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_process: dict[str, tuple[int, int]] = {}  # the highest number, and a bit for each number up to it

    def is_new(self, nonce: str) -> bool:
        """Note a request; return whether it is new. A request 1,024 numbers late is not."""
        process, _, count = nonce.partition("-")
        if not (count.isascii() and count.isdigit() and len(count) < 20):
            return False
        number = int(count)
        with self._lock:
            highest, bits = self._of_process.get(process, (number - 1, 0))
            behind = highest - number
            if behind < 0:
                bits, highest, behind = bits << min(-behind, _WINDOW), number, 0
            if behind >= _WINDOW or bits >> behind & 1:
                return False
            self._of_process[process] = highest, (bits | 1 << behind) & ((1 << _WINDOW) - 1)
            return True


class Doorkeeper:
    """Decide which requests a store accepts, and report the first one that it refuses."""

    def __init__(self) -> None:
        self.key = key_of_job()
        self._seen = Seen()
        self._lock = threading.Lock()
        self._has_reported = False

    def admits(self, method: str, path: str, headers: Mapping[str, str]) -> bool:
        """Return whether a request is this job's and new; without a key, every request is."""
        if not self.key:
            return True
        nonce = headers.get(NONCE, "")
        signature = of_request(self.key, method, path, nonce, headers.get(DIGEST, ""))
        return is_equal(headers.get(SIGNATURE, ""), signature) and self._seen.is_new(nonce)

    def takes(self, headers: Mapping[str, str], body: bytes) -> bool:
        """Return whether the body of an admitted request is the signed one."""
        return not self.key or is_equal(headers.get(DIGEST, ""), digest(body))

    def refused(self, address: str, why: str) -> None:
        """Report a refused request, once in the life of the store."""
        with self._lock:
            has_reported, self._has_reported = self._has_reported, True
        if not has_reported:
            print(
                f"horovod: refused a request from {address} ({why}): it does not belong to this job; "
                "later ones are refused without a message",
                file=sys.stderr,
                flush=True,
            )
