"""Addresses and interfaces that an elastic job uses, on simulated networks."""

import socket
from types import SimpleNamespace

import pytest

from hvd_train.errors import UsageError
from hvd_train.launch import interfaces, ssh
from hvd_train.launch.client import ADDRESS

NETWORKS = {
    "lo": ["127.0.0.1"],
    "docker0": ["172.17.0.1"],
    "eth0": ["192.168.1.5", "192.168.1.99"],
    "ib0": ["10.1.0.5"],
    "down": [],
}
ROUTES = {"10": "10.1.0.5", "192": "192.168.1.99"}  # by the first number of the address
NAMES = {
    "localhost": "127.0.0.1",
    "login": "127.0.1.1",
    "login-ib": "10.1.0.5",
    "n2": "10.1.0.7",
    "n3": "192.168.1.7",
}


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    def gethostbyname(name):
        if name in NAMES:
            return NAMES[name]
        raise socket.gaierror(name)

    hardware = SimpleNamespace(family=socket.AF_PACKET, address="02:00")
    found = {
        name: [hardware, *(SimpleNamespace(family=socket.AF_INET, address=each) for each in own)]
        for name, own in NETWORKS.items()
    }
    monkeypatch.setattr("psutil.net_if_addrs", lambda: found)
    monkeypatch.setattr(ssh.socket, "gethostbyname", gethostbyname)
    monkeypatch.setattr(
        ssh, "_configured", lambda name: {"hostname": name.removeprefix("an alias of ")}
    )
    monkeypatch.setattr(
        interfaces, "_sender_to", lambda address: ROUTES.get(address.partition(".")[0])
    )


def test_a_worker_gets_the_address_of_the_driver_that_it_can_reach() -> None:
    for name in ("localhost", "login", "login-ib"):
        assert interfaces.address_for(name, ["ib0"]) == "127.0.0.1"
    assert interfaces.address_for("n2") == interfaces.address_for("an alias of n2") == "10.1.0.5"
    assert interfaces.address_for("n3") == "192.168.1.99"
    assert interfaces.address_for("a name that only another host knows") == "172.17.0.1"
    assert interfaces.address_for("n2", ["eth0", "ens3"]) == "192.168.1.5"
    assert interfaces.address_for("n2", ["ens3"]) == "10.1.0.5", "this host has no ens3"


def test_a_worker_uses_the_interface_that_leads_to_the_others() -> None:
    """NCCL reads its variable only once, so it never gets the loopback."""
    for driver, elsewhere, interface in (
        ("10.1.0.9", "", "ib0"),  # the driver is on another host
        ("127.0.0.1", "", "lo"),  # the driver is on this host, and so are all workers
        ("127.0.0.1", "10.1.0.5", "ib0"),
    ):
        environ = {ADDRESS: driver, "HOROVOD_GLOO_IFACE": "of an earlier world"}
        interfaces.choose(environ, elsewhere)
        assert environ["HOROVOD_GLOO_IFACE"] == interface
        assert environ.get("NCCL_SOCKET_IFNAME") == (None if interface == "lo" else interface)


def test_interfaces_that_the_user_names_are_used() -> None:
    for named, interface in (("ib0,docker0", "ib0"), ("ens3,docker0", "docker0"), ("lo", "lo")):
        environ = {ADDRESS: "10.1.0.9", "HVD_TRAIN_INTERFACES": named}
        interfaces.choose(environ, "")
        assert (environ["HOROVOD_GLOO_IFACE"], environ["NCCL_SOCKET_IFNAME"]) == (interface, named)
    with pytest.raises(
        UsageError, match="no network interface ens3 or down, only lo, docker0, eth0, ib0; name"
    ):
        interfaces.choose({ADDRESS: "10.1.0.9", "HVD_TRAIN_INTERFACES": "ens3,down"}, "")
