"""Hosts of a static job whose network cards have other names, and names that only ssh knows."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvd_train.launch.hosts import Host
from hvd_train.launch.start import horovodrun
from tests.support import hosts as cluster
from tests.support.hosts import ON_HOSTS, OWN, Hosts
from tests.support.launching import output_of

pytestmark = ON_HOSTS

SUM = """
import os, horovod.torch as hvd, torch
hvd.init()
assert hvd.allreduce(torch.ones(5), op=hvd.Sum).tolist() == [2.0] * 5
open(f"interface.{hvd.rank()}", "w").write(os.environ["NCCL_SOCKET_IFNAME"])
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Run h1 and h2, which share the address of a container network; ssh calls h2 `worker`."""
    with cluster.hosts(tmp_path / "cluster", 2, names=2) as found:
        for name in ("h1", "h2"):
            found.add_network(name, "docker0", "172.17.0.1/16")
        found.rename_network("h2", "ens3")
        config = found.folder / "ssh_config"
        config.write_text(f"Host worker\n  HostName {found.address('h2')}\n{config.read_text()}")
        yield found


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_each_rank_uses_the_interface_that_leads_to_the_launcher(
    hosts: Hosts, tmp_path: Path, controller: str
) -> None:
    job = horovodrun(2, [Host("h1", 1), Host("worker", 1)], controller)
    job += ["--disable-cache", sys.executable, "-c", SUM]
    output_of(hosts.inside("h1", tmp_path, *OWN, f"HOME={tmp_path}", *job), tmp_path)
    assert [(tmp_path / f"interface.{rank}").read_text() for rank in (0, 1)] == ["eth0", "ens3"]
