"""Translate Slurm's variables into Horovod's for ranks that srun started without MPI or horovodrun. No torch."""

import os
import re
import time
import urllib.error
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

from hvd_train.errors import UsageError, whole_number
from hvd_train.launch import client, hosts

_PORTS = range(20_000, 32_000)  # below the ephemeral ports
PORT = "HVD_TRAIN_PORT"
_PATIENCE_S = 120.0
_EXPORT_KEY = f"export {client.KEY}=$(openssl rand -hex 32)"


def alone(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process as one of several tasks, without Horovod's or a PMI's variables."""
    others = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
    tasks = whole_number(environ.get("SLURM_STEP_NUM_TASKS", "")) or 1
    return tasks > 1 and "SLURM_PROCID" in environ and not any(name in environ for name in others)


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return this task's variables for Horovod with Gloo: its ranks and the address of the rendezvous.

    The rendezvous is on the first node of the step, or the loopback if there is no other node. Its port follows from
    job and step, or is HVD_TRAIN_PORT. Raises UsageError if Slurm's variables or HVD_TRAIN_PORT are wrong.
    """
    try:
        tasks = tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
        node, rank, size = (int(environ[name]) for name in ("SLURM_NODEID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
        first = hosts.parse(environ["SLURM_STEP_NODELIST"])[0].name
        step = int(environ["SLURM_JOB_ID"]) * 31 + int(environ["SLURM_STEP_ID"])
        local_rank = int(environ["SLURM_LOCALID"])
    except (KeyError, ValueError) as error:
        raise UsageError(f"srun has started this process, but {error} in its environment does not say how") from None
    port = environ.get(PORT, str(_PORTS[step % len(_PORTS)]))
    if not 0 < (whole_number(port) or 0) < 2**16:
        raise UsageError(f"{PORT} is {port!r}; it must be the number of a port, from 1 to 65535")
    has_local_rank = [count > local_rank for count in tasks]
    ranks = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": tasks[node]}
    ranks |= {"CROSS_RANK": sum(has_local_rank[:node]), "CROSS_SIZE": sum(has_local_rank)}
    return {
        **{f"HOROVOD_{name}": str(number) for name, number in ranks.items()},
        "HOROVOD_HOSTNAME": environ.get("SLURMD_NODENAME", "localhost"),
        **dict.fromkeys(("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"), "gloo"),
        client.ADDRESS: first if len(tasks) > 1 else client.LOOPBACK,
        client.PORT: port,
    }


class KeyFile:
    """The file of the job's key for tasks of this user, unless srun's environment has HOROVOD_RENDEZVOUS_KEY."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        step = f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
        self.path = cache / "hvd_train" / "jobs" / f"{step}.key"

    def write(self, key: str) -> None:
        """Write the key over any earlier file. Raises UsageError if that fails."""
        new = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
                file.write(key)
            new.rename(self.path)
        except OSError as error:
            raise UsageError(f"cannot write {self.path} ({error.strerror}): {_EXPORT_KEY} before srun") from None

    def read(self) -> str | None:
        """Return the key, or None if rank 0 has not written it yet or another user wrote the file."""
        with suppress(OSError), open(os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
            if os.fstat(file.fileno()).st_uid == os.geteuid():
                return file.read()
        return None

    def remove(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


def find_rank_0(environ: MutableMapping[str, str]) -> None:
    """Wait until rank 0, which has the job's key, answers; set that key in `environ`. Raises UsageError after 120 s."""
    deadline = time.monotonic() + _PATIENCE_S
    file = None if environ.get(client.KEY) else KeyFile(environ)
    while True:
        key = environ[client.KEY] if file is None else file.read()
        problem = f"there is no key of its own in {file.path}" if file else ""
        if key is not None:
            try:
                client.get({**environ, client.KEY: key}, "hvd_train/here", 5)
            except urllib.error.HTTPError:  # a signed answer: not found
                environ[client.KEY] = key
                return
            except OSError as error:
                problem = error.strerror or str(error)
        if time.monotonic() > deadline:
            who = f"rank 0 on {environ[client.ADDRESS]} cannot be reached on port {environ[client.PORT]} ({problem})"
            why = "it has not started (see its output), a firewall is in the way, or the nodes share no home folder"
            raise UsageError(f"{who}: {why}: then {_EXPORT_KEY} before srun")
        time.sleep(0.2)


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks of each node: [2, 2, 2, 1] for `2(x3),1`. Raises ValueError."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(text)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
