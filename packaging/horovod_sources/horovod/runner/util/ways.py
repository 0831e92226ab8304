"""Find the network interfaces by which the hosts of a job and horovodrun's host reach each other.

ssh starts this module on each other host. There it tries all addresses of horovodrun's host, and prints which of its
own interfaces reached which of them. It opens no port. Meanwhile horovodrun listens at all its addresses, and answers
only requests that are signed with the job's key.
"""

from __future__ import annotations

import io
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from shlex import quote
from typing import Any, NamedTuple

import psutil
from horovod.runner.common.util import safe_shell_exec
from horovod.runner.common.util.outcome import JobFailedError
from horovod.runner.http import http_client, signature
from horovod.runner.http.http_server import KVStoreHandler, RendezvousHTTPServer
from horovod.runner.util import host_keys, network, threads
from horovod.runner.util.remote import get_remote_command

_TRY_S = 5.0
_ALL_S = 10.0  # for all addresses together, even if one answers a byte at a time
_FOUND = "horovodrun is reached by: "  # shells may have printed other lines before


class _Answer(NamedTuple):
    """horovodrun's interfaces, each with the host's own ones that reach it; or the problem."""

    ways: Mapping[str, Sequence[str]]
    problem: str | None = None


class _Mirror(KVStoreHandler):  # type: ignore[misc]  # Horovod has no types
    """Answer a request with the address it came from, which names the client's interface."""

    def do_GET(self) -> None:  # noqa: N802  # http.server's name
        self._answer(200, self.client_address[0].encode())


def common_interfaces(hosts: Sequence[str], settings: Any) -> list[str]:
    """Return the interfaces by which these hosts and this one reach each other, the likeliest first.

    An interface must have one name on all hosts, since Horovod gives all ranks one name. Raises JobFailedError if there
    is none.
    """
    own = _interfaces()
    own.pop(_interface_of("127.0.0.1", own), None)
    seconds = settings.start_timeout.remaining()
    over = threading.Event()
    with _listening() as port:
        search = json.dumps({"key": signature.key_of_job(), "port": port, "addresses": own}).encode()
        alarm = threading.Timer(seconds, over.set)
        alarm.start()
        try:
            asked = [[host, search, settings, over] for host in hosts]
            answers = threads.execute_function_multithreaded(_ask, asked)
        finally:
            alarm.cancel()
            over.set()
    found = {host: answers[index] for index, host in enumerate(hosts)}
    for host, answer in found.items():
        if answer.problem:
            raise JobFailedError(answer.problem, 1)
        if not answer.ways:
            raise JobFailedError(f"{host} reaches none of the addresses of this host ({_listed(own)}): a firewall?", 1)
    common = [name for name in own if all(name in answer.ways.get(name, ()) for answer in found.values())]
    if not common:
        raise JobFailedError(
            f"no network interface has one name on all hosts: {_described(found)}; give them one name, or use an "
            "elastic job (train_elastic.sh), in which names may differ",
            1,
        )
    first = _interface_to(hosts[0], own)
    return sorted(common, key=lambda name: name != first)


def _ask(host: str, search: bytes, settings: Any, over: threading.Event) -> _Answer:
    printed, errors = io.StringIO(), io.StringIO()
    try:
        command = get_remote_command(
            quote(f"{quote(sys.executable)} -m horovod.runner.util.ways"),
            host=host,
            port=settings.ssh_port,
            identity_file=settings.ssh_identity_file,
            reads_stdin=True,
        )
    except JobFailedError as error:  # this runs in a thread
        return _Answer({}, str(error))
    code = safe_shell_exec.execute(command, stdout=printed, stderr=errors, events=[over], stdin=search)
    for line in printed.getvalue().splitlines():
        if code == 0 and line.startswith(_FOUND):
            return _Answer(json.loads(line.removeprefix(_FOUND)))
    if over.is_set():
        return _Answer({}, f"{host} did not reach this host in time; --start-timeout gives it longer")
    said = [line.strip() for line in (errors.getvalue() or printed.getvalue()).splitlines() if line.strip()]
    why = f": {said[-1]}" if said else f" (exit code {code})"
    return _Answer(
        {}, host_keys.problem(host, errors.getvalue()) or f"{host} cannot search for a way to this host{why}"
    )


@contextmanager
def _listening() -> Iterator[int]:
    server = RendezvousHTTPServer(("", 0), _Mirror, 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def reached(addresses: Mapping[str, Sequence[str]], port: int) -> dict[str, list[str]]:
    """Return, for each of horovodrun's interfaces with their addresses, this host's interfaces that reach it.

    Only an answer that is signed with the job's key counts: two hosts often have the same address on private networks
    of their own, and another program may listen there.
    """
    own, found = _interfaces(), [(name, address) for name, several in addresses.items() for address in several]
    ways: dict[str, list[str]] = {}

    def attempt(name: str, address: str) -> None:
        with suppress(OSError, HTTPException):
            seen = http_client.request("GET", address, port, "/", timeout_s=_TRY_S).decode(errors="replace")
            if by := _interface_of(seen, own):  # none if the network translates addresses
                ways.setdefault(name, []).append(by)

    attempts = [threading.Thread(target=attempt, args=pair, daemon=True) for pair in found]
    deadline = time.monotonic() + _ALL_S
    for thread in attempts:
        thread.start()
    for thread in attempts:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(ways)


def _interfaces() -> dict[str, list[str]]:
    """Return the IPv4 addresses of this host by interface."""
    found = {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }
    return {name: addresses for name, addresses in found.items() if addresses}


def _interface_of(address: str, interfaces: Mapping[str, Sequence[str]]) -> str:
    return next((name for name, addresses in interfaces.items() if address in addresses), "")


def _interface_to(host: str, interfaces: Mapping[str, Sequence[str]]) -> str:
    """Return the interface of packets to a host, "" if only ssh knows its name."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if address := network.resolve_host_address(host):
            probe.connect((address, 9))  # sends nothing; any port will do
            return _interface_of(probe.getsockname()[0], interfaces)
    return ""


def _listed(interfaces: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"{name} {' '.join(addresses)}" for name, addresses in interfaces.items()) or "no network"


def _described(found: Mapping[str, _Answer]) -> str:
    """Describe which interfaces reach which, once for all hosts with the same answer."""
    lines: dict[str, str] = {}
    for host, answer in found.items():
        lines.setdefault(", ".join(f"{name} by {' and '.join(own)}" for name, own in answer.ways.items()), host)
    return "; ".join(f"{host} reaches {ways}" for ways, host in lines.items())


def main() -> None:
    """Read JSON from standard input, which hides the key from other users; print what is reached."""
    try:
        search = json.load(sys.stdin)
        os.environ[signature.KEY] = str(search["key"])
        addresses, port = {str(name): [*map(str, of)] for name, of in search["addresses"].items()}, int(search["port"])
    except (ValueError, KeyError, TypeError, AttributeError):
        print("horovod.runner.util.ways: horovodrun starts this, with JSON in its standard input", file=sys.stderr)
        sys.exit(2)
    print(_FOUND + json.dumps(reached(addresses, port)), flush=True)


if __name__ == "__main__":
    main()
