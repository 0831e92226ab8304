"""Signs requests to the store of a job and checks its answers, with the key that the job's ranks share. No torch.

Who reaches the store's port, or listens there in its place, may be anybody on the network or on the machine. The key
travels in environments, never on a command line and never to the store: both sides sign with it, by HMAC-SHA-256 (RFC
2104). A request has a number of its own, and the answer is signed with that number, so neither can be used again. The
store's side is Horovod's, in packaging/horovod_sources/horovod/runner/http/signature.py.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import os
import secrets
from collections.abc import Mapping
from functools import cache

KEY = "HOROVOD_RENDEZVOUS_KEY"
NONCE, DIGEST, SIGNATURE = "Horovod-Nonce", "Horovod-Digest", "Horovod-Signature"
_numbers = itertools.count()


def make_key() -> str:
    """Return a new random key."""
    return secrets.token_hex(32)


def headers(environ: Mapping[str, str], method: str, path: str, body: bytes = b"") -> dict[str, str]:
    """Return the header lines of a request for "/SCOPE/KEY"; none in a process whose job has no key."""
    key = environ.get(KEY)
    if not key:
        return {}
    nonce, digest = f"{_process(os.getpid())}-{next(_numbers)}", hashlib.sha256(body).hexdigest()
    signature = _signed(key, f"request\n{method}\n{path}\n{nonce}\n{digest}")
    return {NONCE: nonce, DIGEST: digest, SIGNATURE: signature}


def is_answer(
    environ: Mapping[str, str], sent: Mapping[str, str], status: int, received: Mapping[str, str], body: bytes
) -> bool:
    """Return whether the store has answered the request with the header lines `sent`; true where there is no key."""
    key = environ.get(KEY)
    if not key:
        return True
    expected = _signed(key, f"answer\n{sent[NONCE]}\n{status}\n{hashlib.sha256(body).hexdigest()}")
    return hmac.compare_digest(received.get(SIGNATURE, "").encode(), expected.encode())


def _signed(key: str, message: str) -> str:
    return hmac.new(key.encode(), message.encode(), hashlib.sha256).hexdigest()


@cache
def _process(_pid: int) -> str:
    """Return a name that no other process has; a fork is another one."""
    return secrets.token_hex(16)
