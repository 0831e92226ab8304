"""Ranks that srun started without MPI or horovodrun: translates Slurm's variables into Horovod's. No torch."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping

from hvd_train.errors import UsageError
from hvd_train.numerals import whole_number

_PORTS = range(20_000, 32_000)  # below the ports that systems hand out themselves
PORT = "HVD_TRAIN_PORT"
_PATIENCE_S = 120.0


def alone(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process as one of several tasks, without Horovod's or a PMI's variables."""
    others = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
    return (
        (whole_number(environ.get("SLURM_STEP_NUM_TASKS", "")) or 1) > 1
        and "SLURM_PROCID" in environ
        and not any(name in environ for name in others)
    )


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that tell Horovod, with Gloo, this task's ranks and where the ranks meet.

    They meet on the first node of the step, on a port computed from the numbers of the job and the step, or on
    HVD_TRAIN_PORT. Raises UsageError where Slurm's variables are missing or not understood, or where HVD_TRAIN_PORT is
    no port.
    """
    try:
        tasks = tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
        node, rank, size = (int(environ[name]) for name in ("SLURM_NODEID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
        first = first_node(environ["SLURM_STEP_NODELIST"])
        step = int(environ["SLURM_JOB_ID"]) * 31 + int(environ["SLURM_STEP_ID"])
        local_rank = int(environ["SLURM_LOCALID"])
    except (KeyError, ValueError) as error:
        raise UsageError(f"srun has started this process, but {error} in its environment does not say how") from None
    port = environ.get(PORT, str(_PORTS[step % len(_PORTS)]))
    if not 0 < (whole_number(port) or 0) < 2**16:
        raise UsageError(f"{PORT} is {port!r}; it must be the number of a port, from 1 to 65535")
    return {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(local_rank),
        "HOROVOD_LOCAL_SIZE": str(tasks[node]),
        "HOROVOD_CROSS_RANK": str(sum(count > local_rank for count in tasks[:node])),
        "HOROVOD_CROSS_SIZE": str(sum(count > local_rank for count in tasks)),
        "HOROVOD_HOSTNAME": environ.get("SLURMD_NODENAME", "localhost"),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": first,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
    }


def wait_for_rank_0(address: str, port: int) -> None:
    """Wait until rank 0 listens at the address; ranks may import for a while. Raises UsageError after 120 seconds."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            socket.create_connection((address, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UsageError(
                    f"rank 0 on {address} cannot be reached on port {port} ({error.strerror or error}) after "
                    f"{_PATIENCE_S:.0f} s: it has not started (see its output), or a firewall is between the nodes"
                ) from None
            time.sleep(0.2)


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks of each node: [2, 2, 2, 1] for Slurm's `2(x3),1`. Raises ValueError."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(text)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_node(nodes: str) -> str:
    """Return the first node of a list in Slurm's notation: gpu03 for `gpu[03-05,9],login`. Raises ValueError."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodes)
    if match is None:
        raise ValueError(nodes)
    return match[1] + (match[2] or "") + (match[3] or "")
