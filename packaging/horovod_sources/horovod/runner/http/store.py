"""What the core (horovod/common/gloo/gloo_context.cc) asks the launcher's store, from a thread of its own."""

from __future__ import annotations

import os
import time
from http.client import HTTPException
from urllib.error import HTTPError

from horovod.runner.http.http_client import request


def place(host_name: str, local_rank: int) -> bytes:
    """Return the numbers of this worker in a new world; the driver answers as soon as it forms."""
    return _ask("GET", f"/rank_and_size/{host_name}:{local_rank}")


def exchange(scope: str, rank: int, size: int, mine: bytes, limit_s: int) -> bytes:
    """Give each of `size` ranks its part of `mine`, which holds parts of one length for all ranks but this one.

    Returns the parts of the others for this rank. Raises TimeoutError after `limit_s` seconds (0: never).
    """
    _ask("PUT", f"/{scope}/{rank}", mine)
    start = time.monotonic()
    while True:
        try:
            return _ask("GET", f"/{scope}/{rank}-of-{size}")
        except HTTPError as error:
            if error.code != 404:  # the store has waited for a second
                raise
        if 0 < limit_s < time.monotonic() - start:
            limit = f"within {limit_s} seconds; HOROVOD_GLOO_TIMEOUT_SECONDS is the limit"
            raise TimeoutError(f"not all of {size} ranks came {limit}")


def forget(scope: str, rank: int) -> bytes:
    """Say that this rank is connected: the store may forget its addresses."""
    return _ask("DELETE", f"/{scope}/{rank}")


def _ask(method: str, path: str, data: bytes = b"") -> bytes:
    """Return the answer. Raises HTTPError if the store does not have it, and OSError or HTTPException at fault 3."""
    address, port = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    num_faults = 0
    while True:
        try:
            answer: bytes = request(method, address, port, path, data)
            return answer
        except (OSError, HTTPException) as error:
            num_faults += 1
            if num_faults == 3 or getattr(error, "code", 0) == 404:
                raise
        time.sleep(0.5)
