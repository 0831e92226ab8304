"""Launchers: how a process recognizes its own, which horovodrun starts, and how a new worker ends its predecessor."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from hvd_train.errors import UsageError
from hvd_train.launch import launcher
from hvd_train.launch.launcher import (
    JOB,
    REPLACES,
    WORKER,
    Launch,
    horovodrun,
    launched,
    program,
    refuse_others,
)


def test_launchers_are_recognized_by_their_variables() -> None:
    of_horovod, of_mpi = ({f"{name}_RANK": "1", f"{name}_SIZE": "2"} for name in ("HOROVOD", "OMPI_COMM_WORLD"))
    assert launched(of_horovod) == launched({**of_mpi, **of_horovod}) == Launch("horovodrun", 1, 2)
    assert launched(of_mpi) == Launch("Open MPI", 1, 2)
    assert launched({"PMI_RANK": "0", "PMI_SIZE": "8"}) == Launch("MPICH", 0, 8)
    assert launched({}) is launched({"HOROVOD_RANK": "²", "HOROVOD_SIZE": "2"}) is None


IN_TORCHRUN = {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1"}


def test_processes_of_torchrun_are_refused() -> None:
    of_srun = [{"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": tasks, **IN_TORCHRUN} for tasks in "12"]
    for environ in (IN_TORCHRUN, {"WORLD_SIZE": "4"}, *of_srun):
        with pytest.raises(UsageError, match=r"type `horovodrun -np 4 hvd-train train 'a b'`"):
            refuse_others(environ, ["hvd-train", "train", "a b"])


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"},
        {"WORLD_SIZE": "many"},
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "16"},
        {"HOROVOD_ELASTIC": "1", WORKER: "1007"},
        *({f"{name}_RANK": "1", f"{name}_SIZE": "2", **IN_TORCHRUN} for name in ("HOROVOD", "OMPI_COMM_WORLD")),
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", **IN_TORCHRUN},
    ],
)
def test_our_launchers_ignore_variables_of_torchrun(environ: dict[str, str]) -> None:
    refuse_others(environ, ["hvd-train", "train"])


def test_a_launcher_that_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("python").touch()
    Path("horovodrun").touch()
    monkeypatch.setattr(sys, "executable", str(Path("python").absolute()))
    assert horovodrun(4, "hosts", "gloo")[:4] == [str(Path("horovodrun").absolute()), "-np", "4", "--hostfile"]
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match=r"there is no mpirun next to .* type `hvd-train doctor`"):
        program("mpirun")


FOREVER = [sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"]
OURS, OTHER = (f"{name}-{uuid4().hex}" for name in ("ours", "other"))  # jobs that no other run of the tests has


@pytest.fixture
def workers() -> Iterator[dict[tuple[str, str], subprocess.Popen[str]]]:
    found = {}
    for job, number in ((OURS, "1000"), (OURS, "1001"), (OTHER, "1000")):
        environment = {**os.environ, JOB: job, WORKER: number}
        found[job, number] = subprocess.Popen(FOREVER, env=environment, stdout=subprocess.PIPE, text=True)
    for process in found.values():
        assert process.stdout is not None and process.stdout.readline() == "up\n"
    yield found
    for process in found.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("stopped", [True, False])
def test_only_the_predecessor_is_killed_after_the_grace_period(
    stopped: bool, workers: dict[tuple[str, str], subprocess.Popen[str]]
) -> None:
    old = workers[OURS, "1000"]
    if stopped:
        old.send_signal(signal.SIGSTOP)
    launcher.kill_predecessor({JOB: OURS, WORKER: "1002"})  # the first worker of its slot
    launcher.kill_worker("1003", OURS)
    assert old.poll() is None
    begun = time.monotonic()
    launcher.kill_predecessor({JOB: OURS, WORKER: "1002", REPLACES: "1000"}, 0.5)
    assert old.wait(60) == -signal.SIGKILL
    assert time.monotonic() - begun >= 0.5
    for other in (workers[OURS, "1001"], workers[OTHER, "1000"]):
        other.terminate()
        assert other.wait(60) == -signal.SIGTERM
