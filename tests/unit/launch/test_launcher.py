"""How a process recognizes its launcher."""

import socket

from hvd_train.launch.launcher import Launch, host_name, launched, refuse_others
from hvd_train.launch.workers import WORKER


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


def test_other_hosts_can_use_the_name_of_this_one() -> None:
    assert host_name({"HOROVOD_HOSTNAME": "node2"}) == "node2"
    for name in ("localhost", "127.0.0.1", "torchrun-host-1"):
        assert host_name({"HOROVOD_HOSTNAME": name}) == socket.gethostname()
    assert host_name({}) == socket.gethostname()


IN_TORCHRUN = {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1"}


def test_torchrun_is_the_last_launcher_but_may_be_in_a_task() -> None:
    """A single rank runs alone."""
    task = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    assert launched(IN_TORCHRUN) == Launch("torchrun", 1, 4)
    assert launched({**IN_TORCHRUN, "WORLD_SIZE": "1"}) is None
    assert launched({**task, **IN_TORCHRUN}) == Launch("srun", 1, 2)
    of_agent = {**IN_TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}
    assert launched({**task, **of_agent}) == Launch("torchrun", 1, 4)
    of_horovod = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}
    assert launched({**of_agent, **of_horovod}) == Launch("horovodrun", 0, 2)


def test_our_launchers_ignore_variables_of_others() -> None:
    for environ in (
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"},
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "16"},
        {"HOROVOD_ELASTIC": "1", WORKER: "1007"},
        {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", **IN_TORCHRUN},
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", **IN_TORCHRUN},
    ):
        refuse_others(environ, ["hvd-train", "train"])
