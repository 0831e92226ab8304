"""What the environment says about launchers, slots and the age of a job."""

from __future__ import annotations

import re

import pytest

from hvd_train.errors import UsageError
from hvd_train.launch import launcher
from hvd_train.launch.launcher import GOES_ON, SLOT, SPENT, Launch, elastic, goes_on, launched, running_for, slot


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}, Launch("horovodrun", 1, 2)),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, Launch("Open MPI", 3, 4)),
        ({"PMI_RANK": "0", "PMI_SIZE": "8"}, Launch("MPICH", 0, 8)),
        (
            {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "9"},
            Launch("horovodrun", 1, 2),
        ),
        ({"HOROVOD_RANK": "1"}, None),
        ({"PMI_RANK": "", "PMI_SIZE": "x"}, None),
        ({"HOROVOD_RANK": "²", "HOROVOD_SIZE": "2"}, None),
    ],
)
def test_launchers_are_known_by_what_they_set(environment: dict[str, str], expected: Launch | None) -> None:
    """A process is one of a group, or alone."""
    assert launched(environment) == expected


def test_a_worker_keeps_its_slot() -> None:
    """Its local rank may change; outside elastic jobs that is the slot, and a process on its own has the first one."""
    assert slot({SLOT: "3", "HOROVOD_LOCAL_RANK": "0"}) == 3
    assert slot({"HOROVOD_LOCAL_RANK": "1"}) == 1
    assert slot({}) == 0


def test_a_job_is_as_old_as_its_first_process() -> None:
    """Workers come and go: one is told how old the job was when it was started, and adds its own age."""
    assert running_for({SPENT: "1000.5"}, age_s=60.0) == 1060.5
    assert running_for({}, age_s=60.0) == 0.0


def test_what_the_driver_and_the_supervisor_say() -> None:
    """Whether ranks come and go, and whether a process continues a job."""
    assert elastic({"HOROVOD_ELASTIC": "1"})
    assert not elastic({"HOROVOD_RANK": "0"})
    assert goes_on({GOES_ON: "1"})
    assert not goes_on({})


DEEPSPEED = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
TORCHRUN = DEEPSPEED | {"TORCHELASTIC_RUN_ID": "none"}
IN_SRUN = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}  # as in `srun --pty bash`


@pytest.mark.parametrize(
    ("environ", "command", "line"),
    [
        (TORCHRUN, ["/usr/bin/hvd-train", "train", "digits"], "horovodrun -np 2 hvd-train train digits"),
        (TORCHRUN, ["mine.py", "--a b"], "horovodrun -np 2 python mine.py '--a b'"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, ["hvd-train", "evaluate", "r"], "horovodrun -np 4 hvd-train evaluate r"),
        (TORCHRUN, ["mine/__main__.py", "--a"], "horovodrun -np 2 python mine/__main__.py --a"),
        (TORCHRUN | IN_SRUN, ["mine.py"], "horovodrun -np 2 python mine.py"),
        (DEEPSPEED | IN_SRUN, ["mine.py"], "horovodrun -np 2 python mine.py"),
    ],
)
def test_ranks_of_another_launcher_are_refused(environ: dict[str, str], command: list[str], line: str) -> None:
    """Each would work alone; the error is the line to type."""
    with pytest.raises(UsageError, match=re.escape(f"and each would work alone: type `{line}`")):
        launcher.check(environ, command)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        {"WORLD_SIZE": "4", "MASTER_ADDR": "h1"},
        TORCHRUN | {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"},
        TORCHRUN | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        TORCHRUN | {"PMI_RANK": "1", "PMI_SIZE": "2"},
        TORCHRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
        {"RANK": "0", "WORLD_SIZE": "2"} | IN_SRUN,
    ],
)
def test_one_process_and_ranks_of_our_launchers_are_not(environ: dict[str, str]) -> None:
    """Whatever variables of other launchers their jobs have as well."""
    launcher.check(environ, ["hvd-train", "train"])


@pytest.mark.parametrize(
    ("environ", "may"),
    [
        ({}, True),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}, True),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}, False),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_ELASTIC": "1"}, True),
    ],
)
def test_who_may_write(environ: dict[str, str], may: bool) -> None:
    """Rank 0, and in an elastic job any worker, which may be rank 0 of the next world."""
    assert launcher.may_write(environ) is may
