"""Which addresses and interfaces an elastic job uses, on hosts whose networks are data."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from hvd_train.errors import UsageError
from hvd_train.launch import addresses
from hvd_train.launch.client import ADDRESS, PORT

NETWORKS = {
    "lo": ["127.0.0.1"],
    "docker0": ["172.17.0.1"],
    "eth0": ["192.168.1.5", "192.168.1.99"],
    "ib0": ["10.1.0.5"],
    "down": [],
}
NAMES = {"localhost": "127.0.0.1", "login": "127.0.1.1", "login-ib": "10.1.0.5", "n2": "10.1.0.7", "n3": "192.168.1.7"}


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of several networks, whose name leads to 127.0.1.1 on itself."""

    def by_interface() -> dict[str, list[SimpleNamespace]]:
        entries = {
            name: [SimpleNamespace(family=socket.AF_INET, address=a) for a in NETWORKS[name]] for name in NETWORKS
        }
        return {name: [SimpleNamespace(family=socket.AF_PACKET, address="02:00"), *entries[name]] for name in entries}

    def gethostbyname(name: str) -> str:
        if name in NAMES:
            return NAMES[name]
        raise socket.gaierror(name)

    def sender_to(address: str) -> str:
        for network, sender in (("127.", "127.0.0.1"), ("10.1.", "10.1.0.5"), ("192.168.1.", "192.168.1.99")):
            if address.startswith(network):
                return sender
        raise OSError("network is unreachable")

    monkeypatch.setattr(addresses.psutil, "net_if_addrs", by_interface)
    monkeypatch.setattr(addresses.socket, "gethostbyname", gethostbyname)
    monkeypatch.setattr(addresses, "_sender_to", sender_to)


@pytest.mark.parametrize("name", ["localhost", "login", "login-ib"])
def test_a_worker_here_uses_the_loopback(name: str) -> None:
    """By whichever name the list calls this host, and whatever becomes of its networks."""
    assert addresses.for_worker_on(name, ["ib0"]) == ["127.0.0.1"]


def test_the_address_on_the_way_to_a_host_comes_first() -> None:
    """The others follow, one for each interface, for a name that only ssh can resolve, or a way that is one-way."""
    assert addresses.for_worker_on("n2") == ["10.1.0.5", "172.17.0.1", "192.168.1.5"]
    assert addresses.for_worker_on("n3") == ["192.168.1.99", "172.17.0.1", "192.168.1.5", "10.1.0.5"]
    assert addresses.for_worker_on("a name in ~/.ssh/config") == ["172.17.0.1", "192.168.1.5", "10.1.0.5"]


def test_named_interfaces_limit_the_drivers_addresses() -> None:
    """Unless this host, a login node perhaps, has none of them: then any may do."""
    assert addresses.for_worker_on("n2", ["eth0", "ens3"]) == ["192.168.1.5"]
    assert addresses.for_worker_on("n2", ["ib0"]) == ["10.1.0.5"]
    assert addresses.for_worker_on("n2", ["ens3"])[0] == "10.1.0.5"


def test_a_name_that_cannot_be_resolved_is_no_error() -> None:
    """Nor one that is no name at all."""
    assert addresses.resolved("n2") == "10.1.0.7"
    assert addresses.resolved("login") == "127.0.0.1"
    assert addresses.resolved("a name in ~/.ssh/config") is None


@pytest.mark.parametrize(
    ("driver", "elsewhere", "interface"),
    [
        ("10.1.0.9", "", "ib0"),  # on another host: the way to the driver
        ("192.168.1.8", "10.1.0.7", "eth0"),
        ("127.0.0.1", "", "lo"),  # on the driver's host: alone
        ("127.0.0.1", "10.1.0.7", "ib0"),  # or with others
        ("127.0.0.1", "172.16.0.1", "lo"),  # who are out of reach now
    ],
)
def test_the_interface_is_on_the_way_to_the_others(driver: str, elsewhere: str, interface: str) -> None:
    """It is chosen anew each time; NCCL, which reads its variable once, is never told of the loopback."""
    environ = {ADDRESS: driver, "HOROVOD_GLOO_IFACE": "of an earlier world"}
    addresses.choose_interface(environ, elsewhere)
    assert environ["HOROVOD_GLOO_IFACE"] == interface
    assert environ.get("NCCL_SOCKET_IFNAME") == (None if interface == "lo" else interface)


def test_what_the_user_has_named_is_obeyed() -> None:
    """Among several the one on the way is taken; the loopback, too, if it was meant; NCCL's own setting stays."""
    for named, interface in (("eth0", "eth0"), ("docker0,ib0", "ib0"), ("ens3,docker0", "docker0"), ("lo", "lo")):
        environ = {ADDRESS: "10.1.0.9", "HVD_TRAIN_INTERFACES": named}
        addresses.choose_interface(environ, "")
        assert (environ["HOROVOD_GLOO_IFACE"], environ["NCCL_SOCKET_IFNAME"]) == (interface, named)
    environ = {ADDRESS: "10.1.0.9", "NCCL_SOCKET_IFNAME": "ib"}
    addresses.choose_interface(environ, "")
    assert environ["NCCL_SOCKET_IFNAME"] == "ib"


def test_named_interfaces_that_a_host_lacks_are_an_error() -> None:
    """Which says what there is, before the worker asks for a rank."""
    environ = {ADDRESS: "10.1.0.9", "HVD_TRAIN_INTERFACES": "ens3,down"}
    expected = "no network interface ens3 or down with an IPv4 address, only lo, docker0, eth0, ib0; name"
    with pytest.raises(UsageError, match=expected):
        addresses.find_driver(environ)
    with pytest.raises(UsageError, match=expected):
        addresses.choose_interface(environ, "")


def test_interfaces_are_named_by_an_option_or_by_gloos_variable() -> None:
    """The option wins."""
    assert addresses.named_interfaces({"HOROVOD_GLOO_IFACE": "ib0"}, {"eth1", "eth0"}) == ["eth0", "eth1"]
    assert addresses.named_interfaces({"HOROVOD_GLOO_IFACE": "ib0,eth0"}, None) == ["ib0", "eth0"]
    assert addresses.named_interfaces({}, None) == []


def test_a_worker_takes_the_address_of_the_driver_that_answers() -> None:
    """Where none does, the likeliest stays; where there is only one, nobody is asked."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        environ = {ADDRESS: "127.0.0.3", PORT: port, "HVD_TRAIN_DRIVER_ADDRESSES": "127.0.0.3,127.0.0.1"}
        addresses.find_driver(environ)
        assert environ[ADDRESS] == "127.0.0.1"
    environ |= {ADDRESS: "127.0.0.3"}
    addresses.find_driver(environ)
    assert environ[ADDRESS] == "127.0.0.3"
    alone = {ADDRESS: "10.1.0.9", "HVD_TRAIN_DRIVER_ADDRESSES": "10.1.0.9"}
    addresses.find_driver(alone)
    assert alone == {ADDRESS: "10.1.0.9", "HVD_TRAIN_DRIVER_ADDRESSES": "10.1.0.9"}


def test_the_sender_is_asked_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a packet sent."""
    monkeypatch.undo()
    assert addresses._sender_to("127.0.0.1") == "127.0.0.1"
