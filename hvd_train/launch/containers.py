"""Train in a container on each host, with Docker or an engine like it; ranks start over ssh inside the containers.

All steps are lines for a shell: what --dry-run prints is what runs. The containers share a pair of keys made for the
job, which nobody can read in a command line or in the environment of a container.
"""

import os
import shlex
import shutil
import socket
import subprocess
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hvd_train.errors import UsageError
from hvd_train.launch import ssh
from hvd_train.launch.child import STOPPING, Child
from hvd_train.launch.hosts import Host
from hvd_train.launch.start import num_gpus

KEYS = "/etc/hvd_train/ssh"
HOST_FILE = f"{KEYS}/hostfile"
# User 1000 must be able to write there, as whom the containers run, and nobody else.
_MAKE_FOLDER = """
test -d "$0" && exit
install -d -m 755 "$0" || exit
test "$(id -u)" = 1000 || chown 1000 "$0" 2>/dev/null || setfacl -m u:1000:rwx "$0" && exit
rmdir "$0"
echo "user 1000, as whom containers run, could not write to $0: make it, or name another with --runs" >&2
exit 1"""
_READY = "until ssh localhost true; do sleep 0.2; done"


class Job:
    """The shell lines of a job: `command` runs in the container of this host, and the other hosts serve ranks."""

    def __init__(
        self, hosts: Sequence[Host], options: Namespace, command: Sequence[str], environ: Mapping[str, str]
    ) -> None:
        """Take the options of `hvd-train launch`."""
        self._engine = shlex.split(environ.get("CONTAINER_ENGINE", "docker"))
        self._hosts, self._command, self._names = hosts, command, options.env
        self._image = options.image or "hvd_train"
        self.others = [host.name for host in hosts if not ssh.is_here(host.name)]
        self._runs = str(Path(options.runs).absolute())
        self.name = f"hvd_train-{socket.gethostname()}-{os.getpid()}"
        # The hosts' network, because ranks connect to one another on any port. --ipc host, because NCCL needs more
        # than the 64 MB of /dev/shm that a container has.
        self._options = ["--label", "hvd_train", "--network", "host", "--ipc", "host", "--cap-drop", "ALL"]
        self._options += ["--security-opt", "no-new-privileges", "--env", f"HVD_TRAIN_SSH_PORT={options.port}"]
        self._options += [
            word for one in (f"{self._runs}:/home/trainer/runs", *options.volume) for word in ("--volume", one)
        ]
        self._options += shlex.split(environ.get("CONTAINER_FLAGS", ""))
        self._options += ["--gpus", "all"] if num_gpus(environ) else []
        if os.path.isdir("/dev/infiniband"):  # the fast network for NCCL, which locks the memory that it reads
            self._options += ["--device", "/dev/infiniband", "--ulimit", "memlock=-1"]

    def prepare(self, folder: str) -> list[str]:
        """Return the lines that make the keys and the host file of the job in a folder."""
        file = shlex.join([f"{host.name} slots={host.slots}" for host in self._hosts])
        return [
            f"mkdir -m 700 {shlex.quote(folder)}",
            shlex.join(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self.name, "-f", f"{folder}/id_ed25519"]),
            f"printf '%s\\n' {file} > {shlex.quote(f'{folder}/hostfile')}",
        ]

    def start_host(self, host: str, folder: str) -> list[str]:
        """Return the lines that start a container on another host, and wait until its ssh server takes ranks."""
        name = f"{self.name}-{host}"
        wait = self._on(host, "exec", name, "timeout", "20", "sh", "-c", _READY)
        return [*self._make(host, name, folder, [], ["host"]), self._on(host, "start", name), wait]

    def launcher(self, folder: str) -> list[str]:
        """Return the lines that make the launcher's container; `run` starts it."""
        # Without values, which the engine finds in this environment.
        names = [word for name in self._names for word in ("--env", name)]
        return self._make("localhost", self.name, folder, names, self._command)

    def run(self) -> list[str]:
        """Return the command that runs the training, in the launcher's container."""
        return [*self._engine, "start", "--attach", self.name]

    def remove(self) -> list[str]:
        """Return the lines that remove all containers."""
        names = {"localhost": self.name, **{host: f"{self.name}-{host}" for host in self.others}}
        return [self._on(host, "rm", "-f", name) for host, name in names.items()]

    def _make(self, host: str, name: str, folder: str, options: list[str], command: Sequence[str]) -> list[str]:
        made = self._on(host, "create", "--name", name, *self._options, *options, self._image, *command)
        keys = shlex.join(["tar", "-C", folder, "--owner", "1000", "--group", "1000", "--numeric-owner", "-c", "."])
        runs = shlex.join(ssh.command(host, ["sh", "-c", _MAKE_FOLDER, self._runs]))
        return [runs, made, f"{keys} | {self._on(host, 'cp', '-', f'{name}:{KEYS}')}"]

    def _on(self, host: str, *words: str) -> str:
        return shlex.join(ssh.command(host, [*self._engine, *words]))


def lines(job: Job) -> list[str]:
    """Return all lines as a user can type them."""
    folder = f"{tempfile.gettempdir()}/{job.name}"
    starts = [line for host in job.others for line in job.start_host(host, folder)]
    begin = [*job.prepare(folder), *starts, *job.launcher(folder)]
    return [*begin, shlex.join(job.run()), *job.remove(), f"rm -r {folder}"]


def run(job: Job) -> int:
    """Run the job and return its exit code; a signal lets the training commit. Raises UsageError if a step fails."""
    for program in (job.run()[0], "ssh-keygen"):
        if shutil.which(program) is None:
            hint = "apt install openssh-client" if program == "ssh-keygen" else "CONTAINER_ENGINE names another"
            raise UsageError(f"there is no {program} on the PATH: {hint}")
    child = Child(STOPPING)
    with tempfile.TemporaryDirectory() as parent, ThreadPoolExecutor(len(job.others) + 1) as threads:
        folder = f"{parent}/keys"
        try:
            _do(job.prepare(folder))
            list(threads.map(lambda host: _do(job.start_host(host, folder), host), job.others))
            _do(job.launcher(folder), "this host")
            return 128 + child.received if child.received else child.run(job.run())
        finally:
            list(threads.map(lambda line: subprocess.run(["sh", "-c", line], capture_output=True), job.remove()))


def _do(steps: Sequence[str], host: str = "") -> None:
    for line in steps:
        done = subprocess.run(["sh", "-c", line], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise UsageError(f"no container on {host}: {why}; the step was: {line}")
