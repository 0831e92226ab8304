"""The small web server that a launcher of Horovod's runs for its ranks; no torch."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy is for what lies outside
ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"


def ask(environ: Mapping[str, str], path: str, limit_s: float | None = None, put: str | None = None) -> str:
    """What it answers, having been given `put` if that is something; without a limit it may let one wait.

    Raises OSError (HTTPError with its `code`, too).
    """
    url = f"http://{environ[ADDRESS]}:{environ['HOROVOD_GLOO_RENDEZVOUS_PORT']}/{path}"
    data = None if put is None else put.encode()
    request = urllib.request.Request(url, data, method="GET" if put is None else "PUT")  # http, as it says
    with _DIRECT.open(request, timeout=limit_s) as answer:
        text: str = answer.read().decode()
    return text
