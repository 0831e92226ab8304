"""Errors if a host is not ready. test_documented.py starts on several hosts in every way."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hosts import ON_HOSTS, OWN, ROOT, SCRIPTS, WAYS, Hosts, hosts_fixture
from tests.support.launching import PROGRAMS, finished, wait_for

pytestmark = ON_HOSTS

hosts = hosts_fixture(3, names=4, scope="module")  # h4 is a name without a machine


@pytest.fixture(autouse=True)
def _no_left_workers(hosts: Hosts) -> Iterator[None]:
    yield
    wait_for("all workers to be gone", lambda: not any(hosts.workers(name) for name in hosts.inits))


def refused(hosts: Hosts, folder: Path, way: str, listed: str) -> str:
    """Return the output of a training that fails to start without a traceback or a left process."""
    (folder / "hostfile").write_text(listed)
    line = [*OWN, str(SCRIPTS / WAYS[way][0]), *WAYS[way][1:], "--", "digits"]
    code, output = finished(hosts.inside("h1", folder, *line), folder)
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
