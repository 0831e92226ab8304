"""Choose a worker's network interface and the driver's address in an elastic job, whose hosts change. No torch."""

import socket
from collections.abc import Collection, Mapping, MutableMapping
from contextlib import suppress

import psutil

from hvd_train.errors import UsageError
from hvd_train.launch.client import ADDRESS, PORT
from hvd_train.launch.launcher import DRIVER_ADDRESSES, INTERFACES

LOOPBACK = "127.0.0.1"
GLOO_INTERFACE, NCCL_INTERFACES = "HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME"

_ANSWER_S = 2.0


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
    if target is not None:
        with suppress(OSError):
            sender = _sender_to(target)
            if any(sender in addresses for addresses in usable.values()):
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

    On the driver's own host, the one that leads to `elsewhere`, the address of another host in the job, or the loopback
    if that is empty. Interfaces that the user named come first. Raises UsageError if this host has none of them.
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
        raise UsageError(
            f"{socket.gethostname()} has no network interface {' or '.join(named)} with an IPv4 address, only "
            f"{', '.join(own)}; name interfaces of all hosts, or none: then the route to the driver decides"
        )
    return here


def _interface_to(address: str) -> str:
    own, sender = _addresses(), LOOPBACK
    with suppress(OSError):
        sender = _sender_to(address)
    return next((name for name, addresses in own.items() if sender in addresses), "lo")


def _sender_to(address: str) -> str:
    """Return the source address of packets to an address. Raises OSError if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing; any port will do
        sender: str = probe.getsockname()[0]
        return sender


def _addresses() -> dict[str, list[str]]:
    found = {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }
    return {name: addresses for name, addresses in found.items() if addresses}
