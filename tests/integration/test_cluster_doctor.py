"""`hvd-train doctor --hosts` on a good cluster, and with each fault that it must name, made on three hosts."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import hosts as machines
from tests.support.elastic_hosts import ON_HOSTS, ROOT
from tests.support.hosts import Hosts
from tests.support.launching import PROGRAMS, wait_for

pytestmark = ON_HOSTS


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Run h1, h2 and h3; h4 is a name without a machine."""
    with machines.hosts(tmp_path / "cluster", 3, names=4) as found:
        yield found


def examined(hosts: Hosts, folder: Path, *options: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Run the doctor on h1, and return its exit code and its findings by name."""
    command = hosts.typed("h1", folder, "hvd-train", "doctor", "--json", *options)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    wait_for("the doctor's programs to be gone", lambda: not any(list(strays(hosts, name)) for name in hosts.inits), 10)
    return done.returncode, {finding["name"]: finding for finding in report["findings"]}


def strays(hosts: Hosts, name: str) -> Iterator[list[str]]:
    """Yield the command lines of all Python processes on a host."""
    for _, words in hosts.processes(name):
        if words and "python" in Path(words[0]).name:
            yield words


def on(hosts: Hosts, name: str, *command: str) -> None:
    """Run a command on a host."""
    subprocess.run(hosts.inside(name, Path("/"), *command), check=True, capture_output=True)


def test_a_good_cluster(hosts: Hosts, tmp_path: Path) -> None:
    """On a good cluster nothing is broken, and the allreduce over all slots gives a bandwidth for each size."""
    (tmp_path / "hostfile").write_text("h1 slots=1\nh2 slots=1\nh3 slots=1\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "image.jpg").write_bytes(bytes(1000))
    code, found = examined(hosts, tmp_path, "--hosts", "hostfile", "--data-dir", "data")
    broken = [finding for finding in found.values() if finding["verdict"] not in ("ok", "warning")]
    assert (code, broken) == (0, [])
    assert found["data"]["what"] == "1 files of 1,000 bytes in data on each host"
    assert found["connections"]["what"] == "6 tried, both ways"
    assert found["links"]["what"].startswith("slowest: h")
    assert found["network"]["what"] == "the hosts' names lead to eth0 on each"
    assert found["allreduce"]["what"].startswith("3 ranks, bus bandwidth: 1 KB ")
    assert ", 64 MB " in found["allreduce"]["what"]


def other_version(hosts: Hosts, folder: Path) -> None:
    """Give h2 another torch by its metadata, and a changed file of this package."""
    (record,) = (Path(PROGRAMS).parent / "lib").glob("python3*/site-packages/torch-*.dist-info")
    changed = folder / "METADATA"
    changed.write_text((record / "METADATA").read_text().replace("\nVersion: ", "\nVersion: 1.", 1))
    on(hosts, "h2", "mount", "--bind", str(changed), str(record / "METADATA"))
    code = folder / "loop.py"
    code.write_text((ROOT / "hvd_train/loop.py").read_text() + "\n")
    on(hosts, "h2", "mount", "--bind", str(code), str(ROOT / "hvd_train/loop.py"))


def key_not_accepted(hosts: Hosts, folder: Path) -> None:
    """Let h3's sshd accept another key only."""
    other = folder / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    on(hosts, "h3", "mount", "--bind", f"{other}.pub", str(hosts.folder / "user_key.pub"))


def no_python(hosts: Hosts, folder: Path) -> None:
    """Hide the environment on h3."""
    on(hosts, "h3", "mount", "-t", "tmpfs", "none", str(PROGRAMS))


def firewall(hosts: Hosts, folder: Path) -> None:
    """Let h2 reject all connections but those of ssh."""
    rules = "add table ip filter; add chain ip filter input { type filter hook input priority 0; policy accept; }; "
    rules += "add rule ip filter input ct state established accept; "
    rules += "add rule ip filter input ip saddr 10.91.0.0/24 tcp dport != 22 reject"
    on(hosts, "h2", "nft", rules)


def missing_data(hosts: Hosts, folder: Path) -> None:
    """Hide the data on h3 under an empty folder."""
    on(hosts, "h3", "mount", "-t", "tmpfs", "none", str(folder / "data"))


def own_name(hosts: Hosts, folder: Path) -> None:
    """Let h2's own name lead to 127.0.1.1, as Debian's installer sets it."""
    names = folder / "names"
    names.write_text((hosts.folder / "hosts").read_text().replace("10.91.0.2 h2", "127.0.1.1 h2"))
    on(hosts, "h2", "mount", "--bind", str(names), "/etc/hosts")


def little_memory(hosts: Hosts, folder: Path) -> None:
    """Give h2 as little shared memory as docker does by default."""
    on(hosts, "h2", "mount", "-t", "tmpfs", "-o", "size=64m", "shm", "/dev/shm")


def off(hosts: Hosts, folder: Path) -> None:
    """Kill h3."""
    hosts.kill("h3")


FAULTS: dict[str, tuple[Callable[[Hosts, Path], None], str, str, str]] = {
    "another version": (other_version, "torch", "1.2", "`make env` in the same checkout on h2"),
    "other code": (other_version, "code", " on h2", "one environment that all hosts share"),
    "key not accepted": (key_not_accepted, "h3", "Permission denied", "`ssh h3 true` must work without a password"),
    "no Python": (no_python, "h3", "No such file or directory", "set up the same environment in the same place"),
    "firewall": (firewall, "connections", "h1 cannot connect to h2 (Connection refused)", "open all TCP ports"),
    "missing data": (missing_data, "data", "0 files of 0 bytes on h3", "copy it again"),
    "own name": (own_name, "names", "h2 is 127.0.1.1 on h2, which no other host can reach", "mend /etc/hosts"),
    "little memory": (little_memory, "h2: shared memory", "64 MB in /dev/shm", "docker run --shm-size"),
    "off": (off, "h3", "No route to host", "`ssh h3 true`"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str, hosts: Hosts, tmp_path: Path) -> None:
    """A fault is a finding with its host and what to type; findings about sound hosts are still ok."""
    fault, line, what, todo = FAULTS[name]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "image.jpg").write_bytes(bytes(1000))
    if name == "firewall" and subprocess.run(["which", "nft"], capture_output=True, check=False).returncode:
        pytest.skip("there is no nft: apt install nftables")
    fault(hosts, tmp_path)
    code, found = examined(hosts, tmp_path, "-H", "h1,h2,h3", "--quick", "--data-dir", "data")
    assert what in found[line]["what"], found
    assert todo in found[line]["todo"]
    assert found[line]["verdict"] == ("warning" if name == "little memory" else "broken")
    assert code == (0 if name == "little memory" else 1)
    assert found["h1"]["verdict"] == "ok"
