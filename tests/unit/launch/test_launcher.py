"""Launchers: how a process recognizes its own, and which horovodrun starts."""

import sys
from pathlib import Path

import pytest

from hvd_train.errors import UsageError
from hvd_train.launch.launcher import (
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
