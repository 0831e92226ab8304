"""`--np` and `--hosts` of `train`: which ranks are started, by which command, and where that is refused."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hvd_train.cli import run
from hvd_train.errors import UsageError
from hvd_train.launch import start
from hvd_train.launch.start import Ranks, take_ranks

Executed = list[tuple[list[str], dict[str, str]]]


@pytest.fixture
def hosts() -> Path:
    """A host file of this machine with three slots."""
    Path("hosts").write_text("localhost slots=2\n127.0.0.1 slots=1\n")
    return Path("hosts")


@pytest.mark.parametrize(
    ("typed", "ranks", "left"),
    [
        ("digits --epochs 3", None, "digits --epochs 3"),
        ("digits --np 4 --epochs 3", Ranks(4, None, "gloo"), "digits --epochs 3"),
        ("--np=2 --controller=mpi", Ranks(2, None, "mpi"), ""),
        ("--hosts hosts digits", Ranks(3, Path("hosts"), "gloo"), "digits"),
        ("--hosts hosts --np 2", Ranks(2, Path("hosts"), "gloo"), ""),
    ],
)
def test_ranks_are_taken_out_of_the_arguments(hosts: Path, typed: str, ranks: Ranks | None, left: str) -> None:
    """A host file has a rank for each slot unless the number is typed; what is left is for the ranks."""
    assert take_ranks(typed.split(), {}) == (ranks, left.split())


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}, "horovodrun"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, "Open MPI"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, "srun"),
        ({"HOROVOD_ELASTIC": "1"}, "an elastic job"),
    ],
)
@pytest.mark.parametrize("flag", ["--np", "--hosts"])
def test_a_rank_starts_no_ranks(flag: str, environ: dict[str, str], launcher: str) -> None:
    """One line names the launcher that has started it."""
    with pytest.raises(UsageError) as caught:
        take_ranks(["digits", flag, "2"], environ)
    told = f"{flag} starts ranks, and this process is a rank of {launcher} already: leave out one of the two"
    assert str(caught.value) == told


def test_copies_of_torchrun_start_no_ranks() -> None:
    """The line to type has one launcher."""
    environ = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    with pytest.raises(UsageError, match=r"type `horovodrun -np 2 hvd-train train`"):
        take_ranks(["digits", "--np", "2"], environ)


def test_a_shell_of_slurm_starts_ranks() -> None:
    """As after `srun --pty bash`, which is one task."""
    assert take_ranks(["--np", "2"], {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"})[0] == Ranks(2, None, "gloo")


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Executed:
    """The commands, with their environments, that this process would have become; the first one ends it."""
    found: Executed = []

    def become(program: str, line: list[str], environ: dict[str, str]) -> None:
        assert program == line[0]
        found.append((line, environ))
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "execvpe", become)
    return found


def test_the_process_becomes_horovodrun(hosts: Path, executed: Executed) -> None:
    """That of this Python, whose folder the ranks have on their PATH; they get all but the flags that start them."""
    run(["train", "digits", "--hosts", "hosts", "--epochs=3", "--np", "2", "--lr", "0.1"])
    line, environ = executed[0]
    programs = Path(sys.executable).parent
    start_of_line = [str(programs / "horovodrun"), "-np", "2", "--hostfile", "hosts", "--gloo"]
    # as they were read: --lr is an alias
    assert line == [
        *start_of_line,
        str(programs / "hvd-train"),
        "train",
        "digits",
        "--epochs=3",
        "--learning-rate",
        "0.1",
    ]
    assert environ["PATH"].split(":")[0] == str(programs)
    assert environ["HVD_TRAIN_HOSTS"] == "localhost:2,127.0.0.1:1"
    assert environ["HVD_TRAIN_OUTPUT_PREFIX"] == "errors"


def test_what_the_user_has_said_about_output_stays(executed: Executed) -> None:
    """The variable of the environment is stronger than our default."""
    with pytest.raises(KeyboardInterrupt):
        start.become_launcher(Ranks(2, None, "gloo"), ["train"], {"HVD_TRAIN_OUTPUT_PREFIX": "", "PATH": "/bin"})
    assert executed[0][1]["HVD_TRAIN_OUTPUT_PREFIX"] == ""


def test_nothing_is_started_where_a_host_does_not_answer(
    executed: Executed,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each such host is a line."""
    Path("hosts").write_text("h1\nh2\n")
    monkeypatch.setattr("hvd_train.launch.ssh.problems", lambda names, program: [f"{name} is away" for name in names])
    assert run(["train", "--hosts", "hosts"]) == 2
    assert capsys.readouterr().err == "hvd-train: h1 is away\nh2 is away\n"
    assert executed == []
