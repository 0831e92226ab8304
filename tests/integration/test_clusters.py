"""Every way to start on several hosts over ssh, and errors if a host is not ready."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hosts import ON_HOSTS, OWN, ROOT, SCRIPTS, WAYS, Hosts, hosts_fixture
from tests.support.launching import PROGRAMS, commands, finished, output_of, wait_for

pytestmark = ON_HOSTS

hosts = hosts_fixture(3, names=4, scope="module")  # h4 is a name without a machine


def command(hosts: Hosts, folder: Path, way: str, listed: str, *arguments: str) -> list[str]:
    (folder / "hostfile").write_text(listed)
    script, *options = WAYS[way]
    return hosts.inside("h1", folder, *OWN, str(SCRIPTS / script), *options, "--", *arguments)


@pytest.fixture(autouse=True)
def _no_left_workers(hosts: Hosts) -> Iterator[None]:
    yield
    wait_for("all workers to be gone", lambda: not any(hosts.workers(name) for name in hosts.inits))


def refused(hosts: Hosts, folder: Path, way: str, listed: str) -> str:
    """Return the output of a training that fails to start without a traceback or a left process."""
    code, output = finished(command(hosts, folder, way, listed, "digits"), folder)
    assert code != 0
    assert "Traceback" not in output
    return output


@pytest.mark.parametrize("way", ["horovodrun, Gloo", "mpirun"])
def test_a_host_that_is_off_is_named(way: str, hosts: Hosts, tmp_path: Path) -> None:
    error = "h4 does not let us in by ssh without a password (ssh: "
    assert error in refused(hosts, tmp_path, way, "h1 slots=1\nh4 slots=1\n")


def test_a_host_without_the_package(hosts: Hosts, tmp_path: Path) -> None:
    begin = hosts.inside("h3", ROOT)
    subprocess.run([*begin, "mount", "-t", "tmpfs", "none", str(PROGRAMS)], check=True)
    try:
        output = refused(hosts, tmp_path, "horovodrun, Gloo", "h1\nh2\nh3\n")
    finally:
        subprocess.run([*begin, "umount", str(PROGRAMS)], check=True)
    assert f"hvd-train: h3 has no {PROGRAMS}/hvd-train: set up the same environment there" in output


# The commands for hosts, with the hosts and data of this test.
TYPED_HERE = ("Is the cluster ready?", "Start", "A training for each value")
DOCUMENTED = [
    line.replace("node[01-04]:8", "h[1-2]:1").replace("/data/imagenet", "data")
    for heading in TYPED_HERE
    for line in commands("clusters.md")[heading]
]


@pytest.mark.parametrize("line", DOCUMENTED)
def test_a_documented_command(line: str, hosts: Hosts, tmp_path: Path) -> None:
    """Commands of docs/clusters.md run as printed."""
    (tmp_path / "horovodrun_scripts").symlink_to(SCRIPTS)
    (tmp_path / "hostfiles").mkdir()
    for name in ("two_hosts", "elastic"):
        (tmp_path / "hostfiles" / name).write_text("h1 slots=1\nh2 slots=1\n")
    (tmp_path / "data").mkdir()
    # By default mpirun refuses root, and more ranks than cores.
    mpirun = [
        "OMPI_ALLOW_RUN_AS_ROOT=1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
        "OMPI_MCA_rmaps_base_oversubscribe=1",
    ]
    command = hosts.inside("h1", tmp_path, *OWN, *mpirun, "bash", "-c", line)
    output = output_of(command, tmp_path, limit_s=600)
    if "digits --epochs" in line or "--elastic" in line:
        assert "done: top-1" in output
        assert "2 ranks" in output
