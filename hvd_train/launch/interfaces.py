"""Choose the network interfaces and addresses of an elastic job. No torch."""

import socket
from collections.abc import Collection, MutableMapping
from contextlib import suppress

from hvd_train.errors import UsageError
from hvd_train.launch import ssh
from hvd_train.launch.client import ADDRESS, LOOPBACK
from hvd_train.launch.workers import INTERFACES

GLOO_INTERFACE = "HOROVOD_GLOO_IFACE"
NCCL_INTERFACES = "NCCL_SOCKET_IFNAME"


def is_loopback(address: str) -> bool:
    """Return whether an IPv4 address is one of the loopback's."""
    return address.startswith("127.")


def address_for(host_name: str, named: Collection[str] = ()) -> str:
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


def choose(environ: MutableMapping[str, str], elsewhere: str) -> None:
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
