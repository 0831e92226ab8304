"""Where horovodrun looks for the interfaces that its hosts have in common, it alone opens a port, for that time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest

from tests.support import hosts as cluster
from tests.support.elastic_hosts import ON_HOSTS
from tests.support.hosts import Hosts
from tests.support.launching import finished

pytestmark = ON_HOSTS

LISTENS = "0A"  # as Linux writes it
HOROVODRUN = ["horovodrun", "--gloo", "--disable-cache", "-np", "3", "-H", "h1:1,h2:1,h3:1"]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Run h1, h2 and h3, on which another network has the same address, as those of containers have."""
    with cluster.hosts(tmp_path_factory.mktemp("hosts") / "cluster", 3, names=3) as found:
        for name in ("h1", "h2", "h3"):
            found.add_network(name, "docker0", "172.17.0.1/16")
        yield found


def horovodrun(hosts: Hosts, folder: Path, *command: str) -> tuple[int, str]:
    """Return exit code and output of a command on the three hosts."""
    return finished(hosts.typed("h1", folder, f"HOME={folder}", *HOROVODRUN, *command), folder)


def listening(hosts: Hosts, name: str) -> set[str]:
    """Return the addresses at which a host listens, except that of sshd."""
    process, _ = next(hosts.processes(name))
    found = set()
    for line in Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]:
        local, state = line.split()[1], line.split()[3]
        address, port = local.split(":")
        if state == LISTENS and int(port, 16) != 22:
            found.add(str(ip_address(int.from_bytes(bytes.fromhex(address), sys.byteorder))))
    return found


def test_only_horovodrun_opens_a_port(hosts: Hosts, tmp_path: Path) -> None:
    """And the interface that leads from host to host is found, though another one has the same name everywhere."""
    seen: dict[str, set[str]] = {name: set() for name in ("h1", "h2", "h3")}
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            for name, found in seen.items():
                found |= listening(hosts, name)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        code, output = horovodrun(hosts, tmp_path, "sh", "-c", "echo $HOROVOD_GLOO_IFACE $NCCL_SOCKET_IFNAME")
    finally:
        over.set()
        thread.join()
    assert code == 0, output
    assert [line.rpartition("<stdout>:")[2] for line in output.splitlines()] == ["eth0 eth0"] * 3
    assert seen == {"h1": {"0.0.0.0", "10.91.0.1"}, "h2": set(), "h3": set()}


def test_interfaces_of_different_names(hosts: Hosts, tmp_path: Path) -> None:
    """Horovod gives all ranks one name, so that a line says which host has another one, and nothing runs."""
    hosts.rename_network("h3", "ens3")
    code, output = horovodrun(hosts, tmp_path, "touch", "ran")
    assert code == 1
    assert output.startswith("horovodrun: no network interface has one name on all hosts: h2 reaches eth0 by eth0; h3 ")
    assert len(output.splitlines()) == 1
    assert not (tmp_path / "ran").exists()
