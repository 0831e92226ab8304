"""Let ranks that Slurm or torchrun has started find each other, without MPI or horovodrun.

Each takes its place from its environment; rank 0 serves the rendezvous. No torch.
"""

import errno
import hmac
import os
import re
import secrets
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hvd_train.errors import UsageError, whole_number
from hvd_train.launch import client, hosts, launcher, roll_call, workers

_PORTS = range(20_000, 32_000)  # below the ephemeral ports
_FROM_MASTER_PORT = 1000  # the next ones are often those of a host's other jobs
PORT = "HVD_TRAIN_PORT"
SECRET = "HVD_TRAIN_SECRET"  # noqa: S105  # the name of a variable
SECRET_FILE = "HVD_TRAIN_SECRET_FILE"  # noqa: S105
_LEAST_SECRET = 16
_PATIENCE_S = 120.0
_WRONG_KEY_S = 15.0  # the port may still be another job's
_EXPORT_SECRET = f"export the same {SECRET} on all hosts (openssl rand -hex 32 makes one)"


@dataclass(frozen=True)
class _Job:
    """What a launcher's variables say about this rank and its job."""

    numbers: Sequence[int]  # of `workers.rank_variables`
    host: str
    address: str
    port: int
    scope: list[str | None]  # differs from other jobs with the same secret
    shares_home: bool


def needed(environ: Mapping[str, str]) -> bool:
    """Return whether srun or torchrun started this process as one of several,
    without Horovod's or a PMI's variables.
    """
    launched = launcher.launched(environ)
    if launched is None or launched.launcher not in _JOB_OF:
        return False
    return launched.launcher != "srun" or "PMIX_RANK" not in environ


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return this rank's variables for Horovod with Gloo: its ranks, and the address and
    key of the rendezvous.

    The rendezvous is on the host of rank 0, at the loopback if there is no other host. Its port
    follows from the launcher's variables, or is HVD_TRAIN_PORT. Raises UsageError if variables are
    wrong, or if there is no secret.
    """
    launched = launcher.launched(environ)
    assert launched is not None
    try:
        job = _JOB_OF[launched.launcher](environ)
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"{launched.launcher} has started this process, but {error} in its environment does "
            "not say how"
        ) from None
    port = environ.get(PORT, str(job.port))
    if not 0 < (whole_number(port) or 0) < 2**16:
        raise UsageError(f"{PORT} is {port!r}; it must be the number of a port, from 1 to 65535")
    return {
        **workers.rank_variables(job.numbers),
        "HOROVOD_HOSTNAME": job.host,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        client.ADDRESS: job.address,
        client.PORT: port,
        client.KEY: environ.get(client.KEY) or _key(environ, job),
    }


def _of_slurm(environ: Mapping[str, str]) -> _Job:
    """Return the job of a task of srun. Raises KeyError or ValueError for wrong variables."""
    tasks = tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
    node = int(environ["SLURM_NODEID"])
    local_rank = int(environ["SLURM_LOCALID"])
    has_local_rank = [count > local_rank for count in tasks]
    step = int(environ["SLURM_JOB_ID"]) * 31 + int(environ["SLURM_STEP_ID"])
    first = hosts.parse(environ["SLURM_STEP_NODELIST"])[0].name
    return _Job(
        numbers=(
            int(environ["SLURM_PROCID"]),
            int(environ["SLURM_STEP_NUM_TASKS"]),
            local_rank,
            tasks[node],
            sum(has_local_rank[:node]),
            sum(has_local_rank),
        ),
        host=environ.get("SLURMD_NODENAME", "localhost"),
        address=first if len(tasks) > 1 else client.LOOPBACK,
        port=_PORTS[step % len(_PORTS)],
        scope=[environ.get(f"SLURM_{name}") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT")],
        shares_home=True,
    )


def _of_torchrun(environ: Mapping[str, str]) -> _Job:
    """Return the job of a rank of torchrun, or of a launcher that sets some of its variables.

    Without LOCAL_RANK each host has one rank. Raises KeyError or ValueError for wrong variables,
    UsageError if hosts have different numbers of ranks.
    """
    rank = int(environ["RANK"])
    size = int(environ["WORLD_SIZE"])
    local_rank = int(environ.get("LOCAL_RANK", "0"))
    local_size = max(1, int(environ["LOCAL_WORLD_SIZE"])) if "LOCAL_RANK" in environ else 1
    num_hosts = int(environ.get("GROUP_WORLD_SIZE") or size // local_size)
    if num_hosts * local_size != size or rank % local_size != local_rank:
        raise UsageError(
            f"RANK={rank}, WORLD_SIZE={size}, LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE="
            f"{local_size}: start the same number of ranks on each host, numbered by host"
        )
    port = int(environ["MASTER_PORT"])
    address = environ["MASTER_ADDR"]
    is_one_host = num_hosts == 1
    host = rank // local_size
    return _Job(
        numbers=(rank, size, local_rank, local_size, host, num_hosts),
        # containers may all have the same name
        host=f"{launcher.HOST_OF_TORCHRUN}{host}",
        address=client.LOOPBACK if is_one_host else address,
        port=port + (_FROM_MASTER_PORT if port + _FROM_MASTER_PORT < 2**16 else -_FROM_MASTER_PORT),
        # not the number of restarts, which each of torchrun's agents counts for itself
        scope=[environ.get("TORCHELASTIC_RUN_ID"), str(port)],
        shares_home=is_one_host,
    )


_JOB_OF = {"srun": _of_slurm, launcher.TORCHRUN: _of_torchrun}


def _key(environ: Mapping[str, str], job: _Job) -> str:
    """Return the key of a job, made from a secret that all its ranks have. Raises UsageError."""
    if file := environ.get(SECRET_FILE):
        try:
            secret = Path(file).read_bytes().strip()
        except OSError as error:
            raise UsageError(f"{SECRET_FILE}: {file}: {error.strerror}") from None
    elif SECRET in environ:
        secret = environ[SECRET].encode()
    elif job.shares_home:
        secret = _secret_of_user(environ)
    else:
        raise UsageError(f"other hosts reach the port of this job: {_EXPORT_SECRET}")
    if len(secret) < _LEAST_SECRET:
        raise UsageError(f"{SECRET} has fewer than {_LEAST_SECRET} characters: {_EXPORT_SECRET}")
    return hmac.new(secret, f"{job.scope}".encode(), "sha256").hexdigest()


def _secret_of_user(environ: Mapping[str, str]) -> bytes:
    """Return a secret from a file of this user.

    The first rank of all writes it, on a home that nodes of Slurm share. Raises UsageError if that
    fails.
    """
    file = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvd_train" / "secret"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent) as new, suppress(FileExistsError):
            new.write(secrets.token_hex(32))
            new.flush()
            os.fsync(new.fileno())  # before another node reads it over NFS
            os.link(new.name, file)
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW), "rb") as opened:
            secret = opened.read()
            if os.fstat(opened.fileno()).st_uid != os.geteuid() or len(secret) != 64:
                raise PermissionError(errno.EPERM, "it is no secret of this user")
    except OSError as error:
        raise UsageError(f"no secret from {file} ({error.strerror}): {_EXPORT_SECRET}") from None
    return secret


def find_rank_0(environ: Mapping[str, str]) -> None:
    """Wait until rank 0, which has the same key, answers.

    An earlier process of this rank may have been in the world of a rank 0 that still ends; then
    wait for the next one. Raises UsageError after 120 s, or after 15 s if the keys differ.
    """
    begun = time.monotonic()
    while True:
        patience_s = _PATIENCE_S
        try:
            if not roll_call.has_come(environ):
                return
            problem = "it has not ended since a rank was started again"
        except OSError as error:
            problem = error.strerror or str(error)
            if client.UNSIGNED in problem:
                patience_s = _WRONG_KEY_S
        if time.monotonic() - begun > patience_s:
            raise UsageError(
                f"rank 0 on {environ[client.ADDRESS]} cannot be reached on port "
                f"{environ[client.PORT]} ({problem}): it has not started (see its output), a "
                f"firewall is in the way, or it has another secret: then {_EXPORT_SECRET}"
            )
        time.sleep(0.2)


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks of each node: [2, 2, 2, 1] for `2(x3),1`."""
    return [
        int(tasks)
        for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
        for _ in range(int(nodes or 1))
    ]
