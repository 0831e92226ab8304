"""How a process recognizes its launcher."""

import socket

import pytest

from hvd_train.launch.launcher import Launch, host_name, launched, refuse_others
from hvd_train.launch.workers import WORKER

HOROVOD = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}
MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
TASK = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
SHELL = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}  # as within `srun --pty bash`
TORCHRUN = {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1"}
AGENT = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        (HOROVOD, "horovodrun"),
        (MPI, "Open MPI"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "MPICH"),
        (MPI | HOROVOD, "horovodrun"),
        (SHELL | HOROVOD, "horovodrun"),
        (AGENT | HOROVOD, "horovodrun"),
        (TASK | TORCHRUN, "srun"),
    ],
)
def test_launchers_are_recognized_by_their_variables(
    environ: dict[str, str], launcher: str
) -> None:
    assert launched(environ) == Launch(launcher, 1, 2)


def test_torchrun_is_the_last_launcher_but_may_be_in_a_task() -> None:
    assert launched(TORCHRUN) == launched(TASK | AGENT) == Launch("torchrun", 1, 4)


@pytest.mark.parametrize("environ", [{}, SHELL, {**TORCHRUN, "WORLD_SIZE": "1"}])
def test_a_single_rank_runs_alone(environ: dict[str, str]) -> None:
    assert launched(environ) is None


def test_other_hosts_can_use_the_name_of_this_one() -> None:
    assert host_name({"HOROVOD_HOSTNAME": "node2"}) == "node2"
    for name in ("localhost", "127.0.0.1", "torchrun-host-1"):
        assert host_name({"HOROVOD_HOSTNAME": name}) == socket.gethostname()
    assert host_name({}) == socket.gethostname()


def test_our_launchers_ignore_variables_of_others() -> None:
    for environ in (
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"},
        {**TASK, "WORLD_SIZE": "16"},
        {"HOROVOD_ELASTIC": "1", WORKER: "1007"},
        HOROVOD | TORCHRUN,
        {**TASK, "SLURM_STEP_NUM_TASKS": "4", **TORCHRUN},
    ):
        refuse_others(environ, ["hvd-train", "train"])
