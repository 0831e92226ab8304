"""Choose interfaces and addresses of an elastic job; read and write the key-value store of Horovod's launcher.

No torch, and no Horovod unless the job has a key, which signs requests and answers (horovod/runner/http/signature.py).
"""

import http.client
import socket
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping, MutableMapping
from contextlib import suppress
from functools import cache
from typing import Any

from hvd_train.errors import UsageError
from hvd_train.launch.launcher import DRIVER_ADDRESSES, INTERFACES

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy is for addresses outside the cluster
_MOST_BYTES = 1 << 24  # the facts of ten thousand ranks
ADDRESS, PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
KEY = "HOROVOD_RENDEZVOUS_KEY"
LOOPBACK = "127.0.0.1"
GLOO_INTERFACE, NCCL_INTERFACES = "HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME"
_ANSWER_S = 2.0


def get(environ: Mapping[str, str], path: str, timeout_s: float | None = None) -> str:
    """Return the text under `path` ("SCOPE/KEY"); the store may delay its answer.

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
        return body.decode()
    except (http.client.HTTPException, ValueError) as error:  # no HTTP, cut short, or not UTF-8
        raise ConnectionError(f"the answer from {environ[ADDRESS]}:{environ[PORT]} is garbled ({error!r})") from error


def headers(environ: Mapping[str, str], method: str, path: str, body: bytes = b"") -> dict[str, str]:
    """Return the header lines that sign a request for "/SCOPE/KEY"; none if the job has no key."""
    key = environ.get(KEY)
    return dict(_requester().headers(key, method, path, body)) if key else {}


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


def resolved(host_name: str) -> str | None:
    """Return the IPv4 address of a host, or None if only ssh may know the name."""
    try:
        address = socket.gethostbyname(host_name)
    except (OSError, UnicodeError):
        return None
    return LOOPBACK if is_loopback(address) else address  # on Debian a host's own name resolves to 127.0.1.1


def is_loopback(address: str) -> bool:
    """Return whether an IPv4 address is one of the loopback's."""
    return address.startswith("127.")


def for_worker_on(host_name: str, interfaces: Collection[str] = ()) -> list[str]:
    """Return the addresses of this process for a worker on `host_name`, likeliest first.

    Only `interfaces` count, or all if this host has none of them. A worker on this host uses the loopback.
    """
    target, own = resolved(host_name), _addresses()
    if target == LOOPBACK or any(target in addresses for addresses in own.values()):
        return [LOOPBACK]
    others = {name: addresses for name, addresses in own.items() if not is_loopback(addresses[0])}
    usable = {name: addresses for name, addresses in others.items() if name in interfaces} or others
    # One address for each interface (some have hundreds), and the source address of packets to the host.
    found = [addresses[0] for addresses in usable.values()]
    sender = target and _sender_to(target)
    if sender and any(sender in addresses for addresses in usable.values()):
        found = [sender, *(address for address in found if address != sender)]
    return found or [LOOPBACK]


def find_driver(environ: MutableMapping[str, str]) -> None:
    """Set the driver's address in `environ` to the first that answers. Raises UsageError as `choose_interface` does."""
    _named_and_here(environ)
    candidates = environ.get(DRIVER_ADDRESSES, "").split(",")
    for address in candidates if len(candidates) > 1 else ():
        with suppress(OSError), socket.create_connection((address, int(environ[PORT])), _ANSWER_S):
            environ[ADDRESS] = address
            return


def choose_interface(environ: MutableMapping[str, str], elsewhere: str) -> None:
    """Set in `environ` the interface for Gloo and, once, for NCCL: the one that leads to the driver.

    On the driver's own host, the one that leads to `elsewhere`, the address of another host in the job (empty: none).
    Interfaces that the user named come first. Raises UsageError if this host has none of them.
    """
    driver = environ[ADDRESS]
    chosen = _interface_to(elsewhere or LOOPBACK if is_loopback(driver) else driver)
    if named := _named_and_here(environ):
        chosen = chosen if chosen in named else named[0]
        environ.setdefault(NCCL_INTERFACES, environ[INTERFACES])
    elif chosen != _interface_to(LOOPBACK):
        environ.setdefault(NCCL_INTERFACES, chosen)  # NCCL reads it once; unset, it avoids the loopback
    environ[GLOO_INTERFACE] = chosen


def named_interfaces(environ: Mapping[str, str], options: Collection[str] | None) -> list[str]:
    """Return the interfaces that the user named, by the launcher's option or else by Gloo's variable."""
    return sorted(options) if options else [name for name in environ.get(GLOO_INTERFACE, "").split(",") if name]


def _named_and_here(environ: Mapping[str, str]) -> list[str]:
    named, own = [name for name in environ.get(INTERFACES, "").split(",") if name], _addresses()
    here = [name for name in named if name in own]
    if named and not here:
        has = f"{socket.gethostname()} has no network interface {' or '.join(named)}, only {', '.join(own)}"
        raise UsageError(f"{has}; name interfaces of all hosts, or none")
    return here


def _interface_to(address: str) -> str:
    sender = _sender_to(address) or LOOPBACK
    return next((name for name, addresses in _addresses().items() if sender in addresses), "lo")


def _sender_to(address: str) -> str | None:
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing; any port will do
        return str(probe.getsockname()[0])
    return None


def _addresses() -> dict[str, list[str]]:
    import psutil  # a host that only starts containers may lack it

    found = {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }
    return {name: addresses for name, addresses in found.items() if addresses}
