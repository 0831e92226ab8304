"""While horovodrun looks for common interfaces, it alone opens a port."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import hosts as cluster
from tests.support.hosts import ON_HOSTS, OWN, Hosts
from tests.support.launching import finished
from tests.support.strangers import listening

pytestmark = ON_HOSTS

HOROVODRUN = ["horovodrun", "--gloo", "--disable-cache", "-np", "3", "-H", "h1:1,h2:1,h3:1"]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Run h1, h2 and h3, which also share the address of a container network."""
    with cluster.hosts(tmp_path / "cluster", 3, names=3) as found:
        for name in ("h1", "h2", "h3"):
            found.add_network(name, "docker0", "172.17.0.1/16")
        yield found


def test_only_horovodrun_opens_a_port(hosts: Hosts, tmp_path: Path) -> None:
    """The search finds the interface between the hosts, although another one has the same name everywhere."""
    seen: dict[str, set[str]] = {name: set() for name in ("h1", "h2", "h3")}
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            for name, found in seen.items():
                found |= {address for address, port in listening(hosts.init(name)).values() if port != 22}  # sshd's

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        command = [*HOROVODRUN, "sh", "-c", "echo $HOROVOD_GLOO_IFACE $NCCL_SOCKET_IFNAME"]
        code, output = finished(hosts.inside("h1", tmp_path, *OWN, f"HOME={tmp_path}", *command), tmp_path)
    finally:
        over.set()
        thread.join()
    assert code == 0, output
    assert sorted(output.splitlines()) == [f"[{rank}]<stdout>:eth0 eth0" for rank in range(3)]
    assert seen == {"h1": {"0.0.0.0", "10.91.0.1"}, "h2": set(), "h3": set()}
