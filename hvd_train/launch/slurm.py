"""Translate Slurm's variables into Horovod's for ranks that srun started without MPI or horovodrun.

No torch.
"""

import errno
import hmac
import os
import re
import secrets
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hvd_train.errors import UsageError, whole_number
from hvd_train.launch import client, hosts, launcher

_PORTS = range(20_000, 32_000)  # below the ephemeral ports
PORT = "HVD_TRAIN_PORT"
_PATIENCE_S = 120.0
_EXPORT_KEY = f"export {client.KEY}=$(openssl rand -hex 32)"


def alone(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process as one of several tasks, without
    Horovod's or a PMI's variables.
    """
    launched = launcher.launched(environ)
    return launched is not None and launched.launcher == "srun" and "PMIX_RANK" not in environ


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return this task's variables for Horovod with Gloo: its ranks and the
    address of the rendezvous.

    The rendezvous is on the first node of the step, or the loopback if there is no other node. Its
    port follows from job and step, or is HVD_TRAIN_PORT. Raises UsageError if Slurm's variables or
    HVD_TRAIN_PORT are wrong.
    """
    try:
        tasks = tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
        node, rank, size = (
            int(environ[name]) for name in ("SLURM_NODEID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
        )
        first = hosts.parse(environ["SLURM_STEP_NODELIST"])[0].name
        step = int(environ["SLURM_JOB_ID"]) * 31 + int(environ["SLURM_STEP_ID"])
        local_rank = int(environ["SLURM_LOCALID"])
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"srun has started this process, but {error} in its environment does not say how"
        ) from None
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


def key(environ: Mapping[str, str]) -> str:
    """Return the key of this step, HOROVOD_RENDEZVOUS_KEY or one made from a secret of this user.

    The first task of all writes the secret into a file that nodes share. Raises UsageError if that
    fails.
    """
    if given := environ.get(client.KEY):
        return given
    file = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvd_train" / "srun.key"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent) as new, suppress(FileExistsError):
            new.write(secrets.token_hex(32))
            new.flush()
            os.fsync(new.fileno())  # before another node reads it over NFS
            os.link(new.name, file)
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW)) as opened:
            secret = opened.read()
            if os.fstat(opened.fileno()).st_uid != os.geteuid() or len(secret) != 64:
                raise PermissionError(errno.EPERM, "it is no secret of this user")
    except OSError as error:
        raise UsageError(
            f"no key from {file} ({error.strerror}): {_EXPORT_KEY} before srun"
        ) from None
    step = [environ.get(f"SLURM_{name}") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT")]
    return hmac.new(secret.encode(), f"{step}".encode(), "sha256").hexdigest()


def find_rank_0(environ: Mapping[str, str]) -> None:
    """Wait until rank 0, which has the same key, answers. Raises UsageError after 120 s."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            # there is no such text, but the answer is signed
            client.get(environ, "hvd_train/here", 5)
            return
        except OSError as error:
            problem = error.strerror or str(error)
        if time.monotonic() > deadline:
            who = (
                f"rank 0 on {environ[client.ADDRESS]} cannot be reached on port "
                f"{environ[client.PORT]} ({problem})"
            )
            why = (
                "it has not started (see its output), a firewall is in the way, or the nodes "
                "share no home folder"
            )
            raise UsageError(f"{who}: {why}: then {_EXPORT_KEY} before srun")
        time.sleep(0.2)


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks of each node: [2, 2, 2, 1] for `2(x3),1`."""
    return [
        int(tasks)
        for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
        for _ in range(int(nodes or 1))
    ]
