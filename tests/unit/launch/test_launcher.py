"""Launchers: how a process recognizes its own, and how a worker is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from uuid import uuid4

import pytest

from hvd_train.launch import launcher
from hvd_train.launch.launcher import JOB, WORKER, Launch, launched, refuse_others


def test_launchers_are_recognized_by_their_variables() -> None:
    of_horovod, of_mpi = (
        {f"{name}_RANK": "1", f"{name}_SIZE": "2"} for name in ("HOROVOD", "OMPI_COMM_WORLD")
    )
    assert launched(of_horovod) == launched({**of_mpi, **of_horovod}) == Launch("horovodrun", 1, 2)
    assert launched(of_mpi) == Launch("Open MPI", 1, 2)
    assert launched({"PMI_RANK": "0", "PMI_SIZE": "8"}) == Launch("MPICH", 0, 8)
    single = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}  # as within `srun --pty bash`
    assert launched({}) is launched(single) is None
    assert launched({**single, **of_horovod}) == Launch("horovodrun", 1, 2)


IN_TORCHRUN = {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1"}


def test_our_launchers_ignore_variables_of_torchrun() -> None:
    for environ in (
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"},
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "16"},
        {"HOROVOD_ELASTIC": "1", WORKER: "1007"},
        {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", **IN_TORCHRUN},
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", **IN_TORCHRUN},
    ):
        refuse_others(environ, ["hvd-train", "train"])


FOREVER = [sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"]
# jobs that no other run of the tests has
OURS, OTHER = (f"{name}-{uuid4().hex}" for name in ("ours", "other"))


@pytest.fixture
def workers() -> Iterator[list[subprocess.Popen[str]]]:
    environments = [
        {**os.environ, JOB: j, WORKER: n}
        for j, n in ((OURS, "1000"), (OURS, "1001"), (OTHER, "1000"))
    ]
    found = [
        subprocess.Popen(FOREVER, env=env, stdout=subprocess.PIPE, text=True)
        for env in environments
    ]
    for process in found:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
    yield found
    for process in found:
        process.kill()
        process.communicate()


def test_only_that_worker_is_killed_after_the_grace_period(
    workers: list[subprocess.Popen[str]],
) -> None:
    old, *others = workers
    old.send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    launcher.kill_worker("1000", OURS, 0.5)
    assert old.wait(60) == -signal.SIGKILL
    assert time.monotonic() - begun >= 0.5
    for other in others:
        other.terminate()
        assert other.wait(60) == -signal.SIGTERM
