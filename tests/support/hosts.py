"""Hosts on one machine, each with its own network, host name, processes and sshd, as launchers expect them.

A host is a process tree in its own namespaces; all share the file system, as over NFS. The machine's own network and
/etc stay unchanged. This needs root, iproute2, util-linux and openssh-server.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from tests.support.launching import wait_for

SUBNET = "10.91.0"
_NAMESPACES = ("--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--mount-proc")
_WITH_US = ("setpriv", "--pdeathsig", "KILL")  # hosts end with the tests
_BOOT = """
hostname "$1"
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/ssh_config /etc/ssh/ssh_config
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t tmpfs -o mode=755 run /run
mkdir /run/sshd
until ip -o -4 addr show dev eth0 2>/dev/null | grep -q inet; do sleep 0.02; done
exec {sshd} -D -e -f {folder}/sshd_config
"""


def missing() -> str:
    """Return what this machine lacks for such hosts, or ""."""
    if os.geteuid() != 0:
        return "namespaces with networks of their own take root"
    needed = ("ip", "unshare", "nsenter", "setpriv", "sshd", "ssh", "ssh-keygen")
    if absent := [name for name in needed if _program(name) is None]:
        return f"no {', '.join(absent)}: apt install iproute2 util-linux openssh-server openssh-client"
    probe = ["unshare", *_NAMESPACES, "true"]
    return "" if subprocess.run(probe, capture_output=True, check=False).returncode == 0 else "no namespaces here"


@dataclass
class Hosts:
    """Hosts named h1, h2, ...; names that were not booted have no machine."""

    folder: Path
    switch: int
    inits: dict[str, subprocess.Popen[bytes]]
    subnet: str = SUBNET

    def boot(self, name: str) -> None:
        number = int(name[1:])
        self._on_switch("link", "del", f"p{number}", check=False)
        boot = _BOOT.format(folder=self.folder, sshd=_program("sshd"))
        namespaces = ["unshare", *_NAMESPACES, "--propagation=private", "--kill-child"]
        with (self.folder / f"{name}.log").open("ab") as log:
            line = [*_WITH_US, *namespaces, "sh", "-ec", boot, "boot", name]
            host = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self.inits[name] = host
        wait_for(f"{name} to start", lambda: bool(psutil.Process(host.pid).children()))
        own = f"02:00:00:00:00:{number:02x}"  # other hosts remember the address when a host restarts
        peer = ("peer", "name", "eth0", "address", own, "netns", str(self.init(name)))
        self._on_switch("link", "add", f"p{number}", "type", "veth", *peer)
        self._on_switch("link", "set", f"p{number}", "master", "bridge", "up")
        self._ip(name, "link", "set", "lo", "up")
        self._ip(name, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        self._ip(name, "link", "set", "eth0", "up")
        log_file = self.folder / f"{name}.log"
        wait_for(f"sshd of {name}", lambda: "listening on 0.0.0.0" in log_file.read_text())

    def init(self, name: str) -> int:
        return psutil.Process(self.inits[name].pid).children()[0].pid

    def address(self, name: str) -> str:
        return f"{self.subnet}.{name[1:]}"

    def inside(self, name: str, folder: Path, *command: str) -> list[str]:
        return ["nsenter", "-t", str(self.init(name)), "-n", "-u", "-m", "-i", "-p", f"--wd={folder}", *command]

    def processes(self, name: str) -> Iterator[tuple[psutil.Process, list[str]]]:
        here = os.readlink(f"/proc/{self.init(name)}/ns/pid")
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if os.readlink(f"/proc/{process.pid}/ns/pid") == here:
                    yield process, process.cmdline()

    def workers(self, name: str) -> list[psutil.Process]:
        return [
            process
            for process, words in self.processes(name)
            if len(words) > 2 and Path(words[1]).name == "hvd-train" and words[2] == "train"
        ]

    def signal_all(self, name: str, number: int) -> None:
        """Signal all processes of a host but its first, as a shutdown does."""
        for process, _ in list(self.processes(name)):
            if process.pid != self.init(name):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    def kill(self, name: str) -> None:
        """Kill a host; the kernel closes its connections."""
        host = self.inits.pop(name)
        host.send_signal(signal.SIGKILL)
        host.wait()

    def power_off(self, name: str) -> None:
        """Cut a host's network and kill it: no process notices its end."""
        self.unplug(name)
        self.kill(name)

    def unplug(self, name: str) -> None:
        self._on_switch("link", "set", f"p{name[1:]}", "down")

    def plug(self, name: str) -> None:
        self._on_switch("link", "set", f"p{name[1:]}", "up")

    def limit(self, name: str, megabit: float) -> None:
        """Limit what a host sends and receives to this many Mbit/s."""
        rate = f"root tbf rate {megabit}mbit burst 128kb latency 200ms".split()
        _run("nsenter", "-t", str(self.init(name)), "-n", "tc", "qdisc", "replace", "dev", "eth0", *rate)
        _run("nsenter", "-t", str(self.switch), "-n", "tc", "qdisc", "replace", "dev", f"p{name[1:]}", *rate)

    def part(self, one: str, other: str) -> None:
        """Keep two hosts from reaching each other, as a firewall does; others reach both."""
        for host, unreachable in ((one, other), (other, one)):
            self._ip(host, "route", "add", "blackhole", f"{self.address(unreachable)}/32")

    def join(self, one: str, other: str) -> None:
        """Undo `part`."""
        for host, unreachable in ((one, other), (other, one)):
            self._ip(host, "route", "del", "blackhole", f"{self.address(unreachable)}/32")

    def resolve(self, name: str, known: str, address: str) -> None:
        """Let the name `known` resolve to this address on one host only."""
        own = self.folder / f"hosts-{name}"
        lines = (self.folder / "hosts").read_text().splitlines()
        own.write_text("\n".join([*(line for line in lines if line.split()[1] != known), f"{address} {known}\n"]))
        _run("nsenter", "-t", str(self.init(name)), "-m", "mount", "--bind", str(own), "/etc/hosts")

    def add_network(self, name: str, interface: str, address: str) -> None:
        self._ip(name, "link", "add", interface, "type", "bridge")
        self._ip(name, "addr", "add", address, "dev", interface)
        self._ip(name, "link", "set", interface, "up")

    def rename_network(self, name: str, interface: str) -> None:
        for command in (("eth0", "down"), ("eth0", "name", interface), (interface, "up")):
            self._ip(name, "link", "set", *command)

    def _ip(self, name: str, *command: str) -> None:
        _run("nsenter", "-t", str(self.init(name)), "-n", "ip", *command)

    def _on_switch(self, *command: str, check: bool = True) -> None:
        _run("nsenter", "-t", str(self.switch), "-n", "ip", *command, check=check)


@contextmanager
def hosts(folder: Path, count: int, names: int, subnet: str = SUBNET) -> Iterator[Hosts]:
    """Run `count` hosts; `names` host names are known in all."""
    folder.mkdir()
    lines = ["127.0.0.1 localhost", *(f"{subnet}.{number} h{number}" for number in range(1, names + 1))]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    for key in ("host_key", "user_key"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
    (folder / "sshd_config").write_text(
        f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/user_key.pub\nStrictModes no\nPidFile none\n"
        "UsePAM no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\nUseDNS no\nMaxStartups 100\n"
        "ListenAddress 0.0.0.0\n"
    )
    (folder / "ssh_config").write_text(
        f"Host *\n  IdentityFile {folder}/user_key\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n"
        "  LogLevel ERROR\n"
    )
    switch = subprocess.Popen([*_WITH_US, "unshare", "--net", "sleep", "infinity"])
    cluster = Hosts(folder, switch.pid, {}, subnet)
    try:
        own = os.readlink("/proc/self/ns/net")
        wait_for("the switch", lambda: os.readlink(f"/proc/{switch.pid}/ns/net") != own)
        cluster._on_switch("link", "add", "bridge", "type", "bridge", "stp_state", "0", "forward_delay", "0")
        cluster._on_switch("link", "set", "bridge", "up")
        for number in range(1, count + 1):
            cluster.boot(f"h{number}")
        yield cluster
    finally:
        for name in list(cluster.inits):
            cluster.kill(name)
        switch.kill()
        switch.wait()


def hosts_fixture(count: int, names: int | None = None, scope: Literal["function", "module"] = "function") -> Any:
    """Return a fixture that runs `count` hosts; `names` host names are known."""

    @pytest.fixture(scope=scope)
    def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
        with hosts(tmp_path_factory.mktemp("hosts") / "cluster", count, names or count) as found:
            yield found

    return run


def named(address: str) -> str:
    """Return "interface" for the address of a host, and any other address unchanged."""
    return "interface" if address.startswith(f"{SUBNET}.") else address


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def _run(*command: str, check: bool = True) -> None:
    line = [_program(command[0]) or command[0], *command[1:]]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
