"""Choose interfaces and addresses of an elastic job; read and write the key-value
store of Horovod's launcher.

No torch. Horovod signs requests with this process's key, and checks answers
(horovod/runner/http/http_client.py).
"""

import socket
from collections.abc import Collection, Mapping, MutableMapping
from contextlib import suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from urllib.error import HTTPError, URLError

from hvd_train.errors import UsageError
from hvd_train.launch import ssh
from hvd_train.launch.launcher import INTERFACES

ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
KEY = "HOROVOD_RENDEZVOUS_KEY"
LOOPBACK = "127.0.0.1"
GLOO_INTERFACE = "HOROVOD_GLOO_IFACE"
NCCL_INTERFACES = "NCCL_SOCKET_IFNAME"


def get(
    environ: Mapping[str, str], path: str, timeout_s: float | None = None, text: str = ""
) -> str:
    """Return the text under `path` ("SCOPE/KEY"), or "" if there is none; the
    store may delay its answer, which may depend on the `text` sent with the request.

    Raises OSError after `timeout_s` seconds (None: never), for an answer that is not signed with
    the job's key, or if the store refuses.
    """
    return _request(environ, "GET", f"/{path}", text.encode(), timeout_s)


def put(environ: Mapping[str, str], path: str, text: str, timeout_s: float | None = None) -> None:
    """Write `text` under `path` in the store. Raises OSError as `get` does."""
    _request(environ, "PUT", f"/{path}", text.encode(), timeout_s)


def _request(
    environ: Mapping[str, str], method: str, path: str, data: bytes, timeout_s: float | None
) -> str:
    from horovod.runner.http import http_client  # a host that only starts containers may lack it

    store = f"{environ[ADDRESS]}:{environ[PORT]}"
    try:
        answer: bytes = http_client.request(
            method, environ[ADDRESS], environ[PORT], path, data, timeout_s
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
            raise ConnectionError("the answer is not signed by this job")
        return body.decode()


def is_loopback(address: str) -> bool:
    """Return whether an IPv4 address is one of the loopback's."""
    return address.startswith("127.")


def for_worker_on(host_name: str, named: Collection[str] = ()) -> str:
    """Return the address of this process for a worker on `host_name`: on a `named`
    interface, or by the route there.

    A worker on this host uses the loopback.
    """
    target = ssh.address_of(host_name)
    own = _addresses()
    if target and (is_loopback(target) or any(target in addresses for addresses in own.values())):
        return LOOPBACK
    here = [own[name][0] for name in named if name in own]
    found = [*here, target and _sender_to(target), *(addresses[0] for addresses in own.values())]
    return next((address for address in found if address and not is_loopback(address)), LOOPBACK)


def choose_interface(environ: MutableMapping[str, str], elsewhere: str) -> None:
    """Set in `environ` the interface for Gloo and, once, for NCCL: the one
    that leads to the driver.

    On the driver's own host, the one with the address `elsewhere`, where workers on other hosts
    reach the driver (empty: there are none). If the user named interfaces, the first one that this
    host has. Raises UsageError if it has none of them.
    """
    own = _addresses()
    driver = environ[ADDRESS]
    if named := [name for name in environ.get(INTERFACES, "").split(",") if name]:
        here = [name for name in named if name in own]
        if not here:
            has = (
                f"{socket.gethostname()} has no network interface {' or '.join(named)}, "
                f"only {', '.join(own)}"
            )
            raise UsageError(f"{has}; name interfaces of all hosts in {GLOO_INTERFACE}, or none")
        chosen = here[0]
        environ.setdefault(NCCL_INTERFACES, environ[INTERFACES])
    else:
        sender = (elsewhere or LOOPBACK) if is_loopback(driver) else _sender_to(driver)
        chosen = next((name for name, addresses in own.items() if sender in addresses), "lo")
        if sender != LOOPBACK:
            # NCCL reads it once; unset, it avoids the loopback
            environ.setdefault(NCCL_INTERFACES, chosen)
    environ[GLOO_INTERFACE] = chosen


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
