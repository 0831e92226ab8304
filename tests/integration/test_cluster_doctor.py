"""`hvd-train doctor --hosts` on a good cluster, and with each fault that it must name."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.hosts import ON_HOSTS, OWN, ROOT, Hosts, hosts_fixture
from tests.support.launching import PROGRAMS, wait_for

pytestmark = ON_HOSTS


hosts = hosts_fixture(3)


def examined(hosts: Hosts, folder: Path, *options: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Run the doctor on h1; return its exit code and findings by name."""
    command = hosts.inside("h1", folder, *OWN, "hvd-train", "doctor", "--json", *options)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)

    def strays() -> bool:
        return any(words and "python" in words[0] for name in hosts.inits for _, words in hosts.processes(name))

    wait_for("the doctor's programs to be gone", lambda: not strays())
    return done.returncode, {finding["name"]: finding for finding in report["findings"]}


def on(hosts: Hosts, name: str, *command: str) -> None:
    subprocess.run(hosts.inside(name, Path("/"), *command), check=True, capture_output=True)


def test_a_good_cluster(hosts: Hosts, tmp_path: Path) -> None:
    """Host names may resolve to 127.0.1.1; the allreduce reports its sum and speed."""
    for name in ("h1", "h2"):
        hosts.resolve(name, name, "127.0.1.1")  # as Debian's installer does
    (tmp_path / "hostfile").write_text("h1 slots=1\nh2 slots=1\nh3 slots=1\n")
    code, found = examined(hosts, tmp_path, "--hosts", "hostfile")
    assert code == 0, found
    assert {finding["verdict"] for finding in found.values()} <= {"ok", "warning"}
    assert found["connections"]["what"] == "each of 3 hosts reaches each"
    assert found["allreduce"]["what"].startswith("3 ranks, the sum is right, bus bandwidth: 1 KB ")
    assert ", 64 MB " in found["allreduce"]["what"]


def other_version(hosts: Hosts, folder: Path) -> None:
    """Give h2 another torch by its metadata, and a changed file of this package."""
    (record,) = (Path(PROGRAMS).parent / "lib").glob("python3*/site-packages/torch-*.dist-info")
    changed, code = folder / "METADATA", folder / "loop.py"
    changed.write_text((record / "METADATA").read_text().replace("\nVersion: ", "\nVersion: 1.", 1))
    on(hosts, "h2", "mount", "--bind", str(changed), str(record / "METADATA"))
    code.write_text((ROOT / "hvd_train/loop.py").read_text() + "\n")
    on(hosts, "h2", "mount", "--bind", str(code), str(ROOT / "hvd_train/loop.py"))


def key_not_accepted(hosts: Hosts, folder: Path) -> None:
    other = folder / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    on(hosts, "h3", "mount", "--bind", f"{other}.pub", str(hosts.folder / "user_key.pub"))


def firewall(hosts: Hosts, folder: Path) -> None:
    """Let h2 reject all connections except ssh."""
    if subprocess.run(["which", "nft"], capture_output=True, check=False).returncode:
        pytest.skip("there is no nft: apt install nftables")
    rules = "add table ip filter; add chain ip filter input { type filter hook input priority 0; policy accept; }; "
    rules += "add rule ip filter input ct state established accept; "
    rules += "add rule ip filter input ip saddr 10.91.0.0/24 tcp dport != 22 reject"
    on(hosts, "h2", "nft", rules)


def hide(host: str, path: str) -> Callable[[Hosts, Path], None]:
    """Return a fault that hides a folder on one host under an empty, small one."""
    return lambda hosts, folder: on(hosts, host, "mount", "-t", "tmpfs", "-o", "size=64m", "none", str(folder / path))


FAULTS: dict[str, tuple[Callable[[Hosts, Path], None], str, str, str]] = {
    "another version": (other_version, "torch", "1.2", "`make env` in the same checkout on h2"),
    "other code": (other_version, "hvd_train", " on h2", "one environment that all hosts share"),
    "key not accepted": (key_not_accepted, "h3", "Permission denied", "`ssh h3 true` must work without a password"),
    "no Python": (
        hide("h3", str(PROGRAMS)),
        "h3",
        "No such file or directory",
        "set up the same environment in the same place",
    ),
    "firewall": (firewall, "connections", "h1 cannot connect to h2 (Connection refused)", "open all TCP ports"),
    "a wrong address": (
        lambda hosts, _: hosts.resolve("h2", "h3", "10.91.0.1"),
        "names",
        "h3 is 10.91.0.1 on h2, no address of h3",
        "fix /etc/hosts",
    ),
    "little memory": (hide("h2", "/dev/shm"), "h2: shared memory", "64 MB in /dev/shm", "docker run --shm-size"),
    "off": (lambda hosts, _: hosts.kill("h3"), "h3", "No route to host", "`ssh h3 true`"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str, hosts: Hosts, tmp_path: Path) -> None:
    """A finding names the host and what to type; findings about sound hosts stay ok."""
    fault, line, what, todo = FAULTS[name]
    fault(hosts, tmp_path)
    code, found = examined(hosts, tmp_path, "-H", "h1,h2,h3", "--quick")
    assert what in found[line]["what"], found
    assert todo in found[line]["todo"]
    assert found[line]["verdict"] == ("warning" if name == "little memory" else "broken")
    assert code == (0 if name == "little memory" else 1)
    assert found["h1"]["verdict"] == "ok"
