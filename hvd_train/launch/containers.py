"""Train in a container on each host, with Docker or an engine like it; ranks start over
ssh inside the containers.

All steps are lines for a shell: what --dry-run prints is what runs. The containers share a pair of
keys made for the job, which nobody can read in a command line or in the environment of a container.
"""

import os
import shlex
import shutil
import socket
import subprocess
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path

from hvd_train.console import show
from hvd_train.errors import UsageError
from hvd_train.launch import ssh
from hvd_train.launch.child import STOPPING, Child, output_of, why_failed
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
echo "containers run as user 1000, who could not write to $0: make it, or set --runs" >&2
exit 1"""
# The hosts' network, because ranks connect to one another on any port. --ipc host, because NCCL
# needs more than the 64 MB of /dev/shm that a container has. The ranks have 30 s to commit.
_OPTIONS = (
    "--label hvd_train --network host --ipc host --cap-drop ALL "
    "--security-opt no-new-privileges --stop-timeout 40"
)
_KEYGEN = "ssh-keygen -q -t ed25519 -N '' -C {name} -f {folder}/id_ed25519"
_WHY_S = 60  # of `hvd-train why` in a container
_OF_USER_1000 = "tar -C {folder} --owner 1000 --group 1000 --numeric-owner -c ."
_READY = "until ssh localhost true; do sleep 0.2; done"


class Job:
    """The shell lines of a job: a command runs in the container of this host, and
    the other hosts serve ranks.
    """

    def __init__(
        self, hosts: Sequence[Host], options: Namespace, command: Sequence[str], folder: str
    ) -> None:
        """Take the options of `hvd-train launch`, and the folder for the keys and the host file."""
        self._engine = _engine()
        self._folder = folder
        self._image = options.image or "hvd_train"
        self._runs = str(Path(options.runs).absolute())
        self._options = [*shlex.split(_OPTIONS), "--env", f"HVD_TRAIN_SSH_PORT={options.port}"]
        for volume in (f"{self._runs}:/home/trainer/runs", *options.volume):
            self._options += ["--volume", volume]
        self._options += shlex.split(os.environ.get("CONTAINER_FLAGS", ""))
        self._options += ["--gpus", "all"] if num_gpus(os.environ) else []
        # the fast network for NCCL, which locks the memory that it reads
        if os.path.isdir("/dev/infiniband"):
            self._options += ["--device", "/dev/infiniband", "--ulimit", "memlock=-1"]
        name = f"hvd_train-{socket.gethostname()}-{os.getpid()}"
        listed = shlex.join([f"{host.name} slots={host.slots}" for host in hosts])
        self.prepare = [
            f"mkdir -m 700 {shlex.quote(folder)}",
            _KEYGEN.format(name=name, folder=shlex.quote(folder)),
            f"printf '%s\\n' {listed} > {shlex.quote(f'{folder}/hostfile')}",
        ]
        others = {host.name: f"{name}-{host.name}" for host in hosts if not ssh.is_here(host.name)}
        self.starts = {
            host: [
                *self._make(host, its, [], ["host"]),
                self._on(host, "start", its),
                self._on(host, "exec", its, "timeout", "20", "sh", "-c", _READY),
            ]
            for host, its in others.items()
        }
        # Without values, which the engine finds in this environment.
        passed = [word for variable in options.env for word in ("--env", variable)]
        self.launcher = self._make("localhost", name, passed, command)
        self.run = [*self._engine, "start", "--attach", name]
        self.remove = [
            self._on(host, "rm", "-f", its) for host, its in {"localhost": name, **others}.items()
        ]

    def _make(self, host: str, name: str, options: list[str], command: Sequence[str]) -> list[str]:
        made = self._on(
            host, "create", "--name", name, *self._options, *options, self._image, *command
        )
        keys = _OF_USER_1000.format(folder=shlex.quote(self._folder))
        runs = shlex.join(ssh.command(host, ["sh", "-c", _MAKE_FOLDER, self._runs]))
        return [runs, made, f"{keys} | {self._on(host, 'cp', '-', f'{name}:{KEYS}')}"]

    def _on(self, host: str, *words: str) -> str:
        return shlex.join(ssh.command(host, [*self._engine, *words]))


def run(hosts: Sequence[Host], options: Namespace, command: Sequence[str]) -> int:
    """Run the job and return its exit code; with --dry-run print its lines.

    A signal lets the training commit.

    Raises UsageError if a step fails.
    """
    if options.dry_run:
        folder = f"{tempfile.gettempdir()}/hvd_train-{os.getpid()}"
        job = Job(hosts, options, command, folder)
        begin = [*job.prepare, *chain(*job.starts.values()), *job.launcher]
        show("\n".join([*begin, shlex.join(job.run), *job.remove, f"rm -r {folder}"]))
        return 0
    with tempfile.TemporaryDirectory() as parent, ThreadPoolExecutor(len(hosts) + 1) as threads:
        job = Job(hosts, options, command, f"{parent}/keys")
        ssh.check_names([*job.starts])
        child = Child(STOPPING)
        try:
            _do(job.prepare, "this host")
            list(threads.map(_do, job.starts.values(), job.starts))
            _do(job.launcher, "this host")
            return 128 + child.received if child.received else child.run(job.run)
        finally:
            list(threads.map(lambda line: output_of(["sh", "-c", line]), job.remove))


def why(run: Path | None, nothing: str) -> list[str]:
    """Return what `hvd-train why` prints in a container of a job on this host.

    The host sees other process numbers. Raises UsageError with `nothing` if no container knows.
    """
    listed = ["ps", "--quiet", "--filter", "label=hvd_train"]
    names = _printed(listed).split() if shutil.which(_engine()[0]) else []
    words = ["hvd-train", "why", *([f"runs/{run.name}"] if run else [])]
    for name in names:
        if answer := _printed(["exec", name, *words]):
            return answer.splitlines()
    raise UsageError(nothing)


def _printed(words: Sequence[str]) -> str:
    """Return what the engine prints; nothing if it fails."""
    with suppress(subprocess.TimeoutExpired):
        done = output_of([*_engine(), *words], timeout=_WHY_S)
        return "" if done.returncode else done.stdout
    return ""


def _engine() -> list[str]:
    return shlex.split(os.environ.get("CONTAINER_ENGINE") or "docker")


def _do(steps: Sequence[str], host: str) -> None:
    for line in steps:
        done = output_of(["sh", "-c", line])
        if done.returncode:
            raise UsageError(f"no container on {host}: {why_failed(done)}; the step was: {line}")
