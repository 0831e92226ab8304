"""Hosts on one machine, each with its own network, host name, processes and sshd;
elastic jobs and Slurm on them.

A host is a process tree in its own namespaces; all share the file system, as over NFS. The
machine's own network and /etc stay unchanged. This needs root, iproute2, util-linux and
openssh-server.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
import torch

from hvd_train.run_files.ledger import audit
from tests.support.launching import (
    HVD_TRAIN,
    PROGRAMS,
    PROJECT,
    SCRIPTS,
    json_lines,
    output_of,
    started,
    wait_for,
)
from tests.support.on_demand import pace
from tests.support.runs import Weights, largest_difference

SUBNET = "10.91.0"
ROOT = PROJECT
PATH = f"{PROGRAMS}:/usr/sbin:/usr/bin:/sbin:/bin"
WAYS = {
    "horovodrun, Gloo": ["train_hostfile.sh", "hostfile", "--gloo"],
    "horovodrun, MPI": ["train_hostfile.sh", "hostfile", "--mpi"],
    "mpirun": ["train_mpirun.sh", "hostfile"],
    "elastic": ["train_elastic.sh", "--hosts", "hostfile"],
}
ALL = ("h1", "h2", "h3")
# The beginning of a command on a host: the programs and the code of this checkout.
OWN = ["env", f"PATH={PATH}", "OMP_NUM_THREADS=1", f"PYTHONPATH={ROOT}"]
STEPS_PER_EPOCH = 24
TOLERANCE = 1e-5
OBEDIENT = "tests.support.on_demand:obedient"
OWN_LOOP = str(PROJECT / "tests/support/own_loop.py")
# A requeued job waits until its credentials have expired (cred_expire): two minutes by default.
CONF = """
ClusterName=test
SlurmctldHost=h1
AuthType=auth/munge
AuthInfo=cred_expire=5
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
NodeName=h1,h2 CPUs=4 Gres=gpu:4 State=UNKNOWN
SchedulerParameters=bf_interval=1,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""
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
    if not all(map(_program, needed)):
        return "apt install iproute2 util-linux openssh-server openssh-client"
    probe = ["unshare", *_NAMESPACES, "true"]
    fails = subprocess.run(probe, capture_output=True, check=False).returncode
    return "no namespaces here" if fails else ""


@dataclass
class Hosts:
    """Hosts named h1, h2, ...; names that were not booted have no machine."""

    folder: Path
    switch: int
    inits: dict[str, subprocess.Popen[bytes]]

    def boot(self, name: str) -> None:
        number = int(name[1:])
        self._on_switch("link", "del", f"p{number}", check=False)
        boot = _BOOT.format(folder=self.folder, sshd=_program("sshd"))
        namespaces = ["unshare", *_NAMESPACES, "--propagation=private", "--kill-child"]
        with (self.folder / f"{name}.log").open("ab") as log:
            line = [*_WITH_US, *namespaces, "sh", "-ec", boot, "boot", name]
            host = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.inits[name] = host
        wait_for(f"{name} to start", lambda: bool(psutil.Process(host.pid).children()))
        # other hosts remember the address when a host restarts
        own = f"02:00:00:00:00:{number:02x}"
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
        return f"{SUBNET}.{name[1:]}"

    def inside(self, name: str, folder: Path, *command: str) -> list[str]:
        enter = f"nsenter -t {self.init(name)} -n -u -m -i -p".split()
        return [*enter, f"--wd={folder}", *command]

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
            if len(words) > 2
            and (
                (Path(words[1]).name == "hvd-train" and words[2] == "train") or words[1] == OWN_LOOP
            )
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
        _in_network(self.init(name), "tc", "qdisc", "replace", "dev", "eth0", *rate)
        _in_network(self.switch, "tc", "qdisc", "replace", "dev", f"p{name[1:]}", *rate)

    def part(self, one: str, other: str, *, undo: bool = False) -> None:
        """Keep two hosts from reaching each other, as a firewall does; others reach both."""
        change = "del" if undo else "add"
        for host, unreachable in ((one, other), (other, one)):
            self._ip(host, "route", change, "blackhole", f"{self.address(unreachable)}/32")

    def resolve(self, name: str, known: str, address: str) -> None:
        """Let the name `known` resolve to this address on one host only."""
        own = self.folder / f"hosts-{name}"
        lines = (self.folder / "hosts").read_text().splitlines()
        lines = [line for line in lines if line.split()[1] != known]
        own.write_text("\n".join([*lines, f"{address} {known}\n"]))
        _run("nsenter", "-t", str(self.init(name)), "-m", "mount", "--bind", str(own), "/etc/hosts")

    def add_network(self, name: str, interface: str, address: str) -> None:
        self._ip(name, "link", "add", interface, "type", "bridge")
        self._ip(name, "addr", "add", address, "dev", interface)
        self._ip(name, "link", "set", interface, "up")

    def rename_network(self, name: str, interface: str) -> None:
        for command in (("eth0", "down"), ("eth0", "name", interface), (interface, "up")):
            self._ip(name, "link", "set", *command)

    def _ip(self, name: str, *command: str) -> None:
        _in_network(self.init(name), "ip", *command)

    def _on_switch(self, *command: str, check: bool = True) -> None:
        _in_network(self.switch, "ip", *command, check=check)


@contextmanager
def hosts(folder: Path, count: int, names: int) -> Iterator[Hosts]:
    """Run `count` hosts; `names` host names are known in all."""
    folder.mkdir()
    lines = [f"{SUBNET}.{number} h{number}\n" for number in range(1, names + 1)]
    (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]))
    for key in ("host_key", "user_key"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
    (folder / "sshd_config").write_text(
        f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/user_key.pub\nStrictModes "
        "no\nPidFile none\n"
        "UsePAM no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\nUseDNS "
        "no\nMaxStartups 100\n"
        "ListenAddress 0.0.0.0\n"
    )
    (folder / "ssh_config").write_text(
        f"Host *\n  IdentityFile {folder}/user_key\n  StrictHostKeyChecking no\n  "
        "UserKnownHostsFile /dev/null\n"
        "  LogLevel ERROR\n"
    )
    switch = subprocess.Popen([*_WITH_US, "unshare", "--net", "sleep", "infinity"])
    cluster = Hosts(folder, switch.pid, {})
    try:
        own = os.readlink("/proc/self/ns/net")
        wait_for("the switch", lambda: os.readlink(f"/proc/{switch.pid}/ns/net") != own)
        cluster._on_switch(
            "link", "add", "bridge", "type", "bridge", "stp_state", "0", "forward_delay", "0"
        )
        cluster._on_switch("link", "set", "bridge", "up")
        for number in range(1, count + 1):
            cluster.boot(f"h{number}")
        yield cluster
    finally:
        for name in list(cluster.inits):
            cluster.kill(name)
        switch.kill()
        switch.wait()


def hosts_fixture(
    count: int, names: int | None = None, scope: Literal["function", "module"] = "function"
) -> Any:
    """Return a fixture that runs `count` hosts; `names` host names are known."""

    @pytest.fixture(scope=scope)
    def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
        with hosts(tmp_path_factory.mktemp("hosts") / "cluster", count, names or count) as found:
            yield found

    return run


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def _in_network(process: int, *command: str, check: bool = True) -> None:
    _run("nsenter", "-t", str(process), "-n", *command, check=check)


def _run(*command: str, check: bool = True) -> None:
    line = [_program(command[0]) or command[0], *command[1:]]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


NO_HOSTS = missing()
ON_HOSTS = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS or "-"),
]
HAS_SLURM = all(map(_program, ("slurmctld", "slurmd", "munged")))
ON_SLURM = [
    *ON_HOSTS,
    pytest.mark.skipif(not HAS_SLURM, reason="no Slurm: apt install slurmctld slurmd munge"),
]


def arguments(epochs: int = 8, model: str = OBEDIENT, more: str = "--output-dir run") -> list[str]:
    """Return arguments of a training of `STEPS_PER_EPOCH * epochs` steps
    in 3 slots, with a ledger.
    """
    line = (
        f"--data digits --model {model} --epochs {epochs} --global-batch-size 60 --batch-size 20 "
        "--ledger --learning-rate 0.02 --augment none --log-steps 1 --device cpu "
        f"--commit-steps 10 {more}"
    )
    return line.split()


def undisturbed(
    folder: Path, epochs: int = 8, training: Sequence[str] | None = None, limit_s: float = 280
) -> Weights:
    """Return the weights of the same training in one undisturbed process."""
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    training = training or arguments(epochs)
    program = [sys.executable] if training[0] == OWN_LOOP else [HVD_TRAIN, "train"]
    output_of([*program, *training], folder, limit_s, variables)
    return torch.load(run_below(folder) / "model-final.pt", weights_only=True)


def run_below(folder: Path) -> Path:
    """Return the only folder below `runs` in `folder`, else `run`."""
    made = [path for path in (folder / "runs").glob("*") if path.is_dir()]
    assert len(made) <= 1, f"the same command started another run: {made}"
    return made[0] if made else folder / "run"


def list_hosts(folder: Path, lines: Sequence[str]) -> None:
    """Replace a job's host file atomically."""
    (folder / "hosts.new").write_text("\n".join(lines) + "\n")
    (folder / "hosts.new").rename(folder / "hostfile")


@dataclass
class Training:
    """A running training; `folder` has its run and its output."""

    folder: Path
    launcher: subprocess.Popen[bytes]

    @property
    def run(self) -> Path:
        return run_below(self.folder)

    @property
    def steps(self) -> int:
        lines = json_lines(self.run / "ledger.jsonl")
        return lines[-1]["steps"][1] if lines else 0

    @property
    def worlds(self) -> list[dict[str, Any]]:
        """The changes of world and the starts of the training in the journal."""
        return [
            line
            for line in json_lines(self.run / "metrics.jsonl")
            if line.get("name") in ("start", "world")
        ]

    @property
    def changes(self) -> list[dict[str, Any]]:
        """The changes of world in the journal."""
        return [event for event in self.worlds if event["name"] == "world"]

    def after(self, steps: int) -> None:
        self.wait_for(f"step {steps}", lambda: self.steps >= steps)

    def reaches(self, size: int) -> None:
        self.wait_for(
            f"{size} ranks", lambda: [event["world_size"] for event in self.changes][-1:] == [size]
        )

    def wait_for(self, what: str, condition: Callable[[], object]) -> None:
        """Wait until `condition` holds while the training runs."""
        wait_for(what, lambda: condition() or self.launcher.poll() is not None, limit_s=200)
        assert self.launcher.poll() is None, self.output

    @property
    def output(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("output*.txt")))


@dataclass
class Job(Training):
    """A training that was started on a host, by default h1."""

    hosts: Hosts

    def worker(self, host: str) -> psutil.Process:
        return self.hosts.workers(host)[0]

    @property
    def driver(self) -> psutil.Process:
        """The driver, which replaced the process of `hvd-train launch`."""
        return psutil.Process(self.launcher.pid).children()[0]

    def list(self, *lines: str) -> None:
        list_hosts(self.folder, lines)

    def completes(self, expected: Weights) -> None:
        """Wait for the end of the training, at full speed, and check its result."""
        pace(self.folder, 0)
        wait_for("the end", lambda: self.launcher.poll() is not None, limit_s=500)
        assert self.launcher.returncode == 0, self.output
        check(self, expected)


@contextmanager
def job(
    hosts: Hosts,
    folder: Path,
    *options: str,
    listed: tuple[str, ...] = ALL,
    training: list[str] | None = None,
    **place: Any,
) -> Iterator[Job]:
    """Train on the listed hosts, and kill remaining processes at the end."""
    list_hosts(folder, listed)
    line = command(hosts, folder, options, training or arguments(), **place)
    with started(line, folder, folder / "output.txt") as launcher:
        yield Job(folder, launcher, hosts)


def command(
    hosts: Hosts,
    folder: Path,
    options: Sequence[str],
    training: Sequence[str],
    environment: Sequence[str] = (),
    start_on: str = "h1",
) -> list[str]:
    """Return the command that trains on the listed hosts, typed on `start_on`."""
    script = [str(SCRIPTS / "train_elastic.sh"), "--hosts", "hostfile", *options, "--", *training]
    return hosts.inside(start_on, folder, *OWN, *environment, *script)


def check(running: Job, expected: Weights, epochs: int = 8, tolerance: float = TOLERANCE) -> float:
    """Assert that no sample or step is lost and the weights are the undisturbed
    ones; return their distance.
    """
    report = audit(running.run)
    assert (report.faults, report.epochs, report.steps) == ((), epochs, epochs * STEPS_PER_EPOCH), (
        report
    )
    assert all(change["steps_lost"] == 0 for change in running.changes)
    weights = torch.load(running.run / "model-final.pt", weights_only=True)
    weights.pop("ballast", None)
    difference = largest_difference(weights, expected)
    assert difference <= tolerance, f"{difference} > {tolerance}"
    return difference


@dataclass
class Slurm:
    """A Slurm cluster of h1 and h2."""

    hosts: Hosts
    folder: Path

    def words(self, *words: str) -> list[str]:
        """Return the command that runs another one on h1 as a user would."""
        # nodes share it: ranks of a plain srun have their secret there
        own = [f"HOME={self.folder}", f"SLURM_CONF={self.folder}/slurm.conf"]
        return self.hosts.inside("h1", self.folder, *OWN, *own, *words)

    def command(self, *words: str) -> str:
        done = subprocess.run(
            self.words(*words), capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def output(self, job: str) -> str:
        path = self.folder / f"hvd_train-{job}.out"
        return path.read_text() if path.exists() else ""


@contextmanager
def slurm_on_hosts(tmp: Path) -> Iterator[Slurm]:
    """Run a Slurm cluster in this folder; its daemons end with their hosts."""
    with hosts(tmp / "cluster", 2, names=2) as nodes:
        folder = tmp / "slurm"
        for name in ("state", "spool-h1", "spool-h2"):
            (folder / name).mkdir(parents=True)
        (folder / "slurm.conf").write_text(CONF.format(folder=folder))
        # Slurm counts the devices, and looks no further
        stand_ins = ("null", "zero", "full", "random")
        (folder / "gres.conf").write_text(
            "".join(f"Name=gpu File=/dev/{name}\n" for name in stand_ins)
        )
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        for name in nodes.inits:
            setup = (
                f"install -d -m 711 -o munge /run/munge && install -m 600 -o munge {key} "
                "/run/munge/key && setpriv --reuid=munge --regid=munge --clear-groups munged "
                "--key-file /run/munge/key --force && "
                f"{'slurmctld -i && ' if name == 'h1' else ''} slurmd -N {name}"
            )
            start = ["env", f"PATH={PATH}", f"SLURM_CONF={folder}/slurm.conf", "sh", "-ec", setup]
            with (folder / f"{name}.out").open("wb") as log:
                subprocess.run(
                    nodes.inside(name, folder, *start),
                    check=True,
                    stdout=log,
                    stderr=log,
                    timeout=200,
                )
        found = Slurm(nodes, folder)
        wait_for("two idle nodes", lambda: "2 idle" in found.command("sinfo", "-h", "-o", "%D %t"))
        yield found
