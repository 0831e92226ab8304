"""`hvd-train launch --dry-run`: the command of each way to start ranks, as a user can type it."""

import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import Mock

import pytest

from hvd_train.launch import ssh, start
from tests.support.launching import LOCALHOST, PYTHON, write_program
from tests.unit.commands.conftest import Command, typed_and_printed

MPIRUNS = {
    "4": "mpirun (Open MPI) 4.1.8",
    "5": "mpirun (Open MPI) 5.0.9",
    "mpich": "HYDRA build details:\n    Version: 4.3.2",
    "intel": "Intel(R) MPI Library for Linux* OS, Version 2021.17",
}
Printed = Callable[[str], str]


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a folder of programs that are on the PATH."""
    folder = tmp_path / "an environment" / "bin"
    for name in ("horovodrun", "hvd-train", "orted"):
        write_program(folder, name, "exit 9")
    write_program(folder, "python", f'exec {PYTHON} "$@"')
    monkeypatch.setattr("sys.executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    for name in ("CUDA_VISIBLE_DEVICES", "HVD_TRAIN_ENV"):
        monkeypatch.setenv(name, "")
    return folder


@pytest.fixture
def printed(command: Command, programs: Path) -> Printed:
    """Return a function that prints what `hvd-train launch` would run."""

    def run(line: str) -> str:
        out, err = command(f"launch --dry-run {line}")
        assert err == ""
        return out.strip()

    return run


# What `hvd-train launch --dry-run` prints for each command line.
STARTED = """
$ -n 3 -- train digits --epochs 5
horovodrun -np 3 --gloo hvd-train train digits --epochs 5
$ -n 3 -- digits --epochs 5
horovodrun -np 3 --gloo hvd-train train digits --epochs 5
$ -n 3 -- hvd-train train digits --epochs 5
horovodrun -np 3 --gloo hvd-train train digits --epochs 5
$ --np 2
horovodrun -np 2 --gloo hvd-train train
$ --np 2 -- mine.py --lr 1
horovodrun -np 2 --gloo python mine.py --lr 1
$ --np 2 python 'my loop.py'
horovodrun -np 2 --gloo python 'my loop.py'
$ --hosts a:4,b:4 --np 6
horovodrun -np 6 -H a:4,b:4 --gloo hvd-train train
$ --with slurm --np 4 -- digits --epochs 5
srun --ntasks 4 hvd-train train digits --epochs 5
$ --with slurm --requeue -- digits --epochs 5
srun hvd-train train digits --epochs 5 --output-dir runs/slurm-7
$ --with slurm --requeue -- mine.py --output-dir=o
srun python mine.py --output-dir=o
$ --with slurm --image a.sif -- digits --epochs 5
srun apptainer exec --nv a.sif hvd-train train digits --epochs 5
$ --with apptainer --np 2 -- digits --epochs 5
apptainer exec hvd_train.sif horovodrun -np 2 --gloo hvd-train train digits --epochs 5
"""
CASES = typed_and_printed(STARTED)


@pytest.mark.parametrize("line", CASES)
def test_the_command_of_a_way_to_start(
    line: str, printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch job that goes back into the queue writes into one folder."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(ssh, "check", lambda *_: None)
    assert printed(line) == CASES[line]
    assert list(Path().iterdir()) == [Path("an environment")]


def test_programs_that_are_not_on_the_path_have_their_whole_path(
    printed: Printed, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"].partition(":")[2])
    monkeypatch.setattr("shutil.which", lambda name: None)
    words = shlex.split(printed("-- digits"))
    assert [words[0], words[-3]] == [f"{programs}/horovodrun", f"{programs}/hvd-train"]


@pytest.mark.parametrize(
    ("devices", "cores", "ranks"),
    [
        ("0,1,2", 1, 3),
        ("0,-1,1", 64, 1),
        ("-1", 64, 2),
        ("GPU-1a,GPU-2b", 64, 2),
        ("", 64, 2),
        ("", 1, 1),
    ],
)
def test_there_is_a_rank_for_each_visible_gpu_or_two(
    devices: str, cores: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs are counted as CUDA does: the list ends before a -1. Without one, no more than cores."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores))
    assert start.default_ranks({"CUDA_VISIBLE_DEVICES": devices}) == ranks


def test_gpus_that_the_driver_lists_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """MIG parts do not count."""
    lines = (
        "GPU 0: H100 (UUID: GPU-1)\n  MIG 1g.10gb Device 0: (UUID: MIG-1)\nGPU 1: "
        "H100 (UUID: GPU-2)\n"
    )
    monkeypatch.setattr("subprocess.run", lambda *_, **__: CompletedProcess([], 0, lines))
    assert start.default_ranks({}) == 2


def test_slots_of_the_hosts_are_the_ranks(
    printed: Printed, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --mpi, the Open MPI of this environment gets its folder and daemon on other
    hosts, unless these are set.
    """
    Path("my hosts").write_text(
        "a slots=4\nb.example slots=3 max_slots=8\n10.0.0.1:08\r\n\nc # one slot\n# d\n"
    )
    begin = "horovodrun -np 16 -H a:4,b.example:3,10.0.0.1:8,c:1 --gloo "
    assert printed("--hosts 'my hosts' -- digits").startswith(begin)
    agent = f"OMPI_MCA_orte_launch_agent='{programs}/orted'"
    begin = shlex.join(["env", f"OPAL_PREFIX={programs.parent}", agent, "horovodrun"])
    assert printed(f"--hosts {LOCALHOST} --mpi").startswith(begin)
    monkeypatch.setenv("OMPI_MCA_orte_launch_agent", "my-orted")
    monkeypatch.setenv("OPAL_PREFIX", "/my/mpi")
    assert printed(f"--hosts {LOCALHOST} --with mpi").startswith("horovodrun")


@pytest.mark.parametrize("kind", MPIRUNS)
def test_each_mpirun_gets_its_own_flags(
    kind: str, printed: Printed, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each mpirun gets hosts, slots, needed variables, no binding to cores, and
    an ssh that never prompts.
    """
    write_program(programs, "mpirun", f"printf '%s\\n' {shlex.quote(MPIRUNS[kind])}")
    (programs / "orted").unlink()
    for name, value in {
        "NCCL_DEBUG": "INFO",
        "MPIRUN_FLAGS": "--tag x",
        "WANTED": "hunter2",
        "AWS_SECRET_ACCESS_KEY": "hunter2",
    }.items():
        monkeypatch.setenv(name, value)
    line = printed("--with mpirun --hosts a:4,b:2 --env WANTED -- digits --epochs 5")
    assert line.startswith("env HVD_TRAIN_ENV=WANTED mpirun -np 6 --tag x ")
    assert line.endswith(" hvd-train train digits --epochs 5")
    if kind in ("4", "5"):
        ssh_flag = {"4": "--mca plm_rsh_args", "5": "--prtemca plm_ssh_args"}[kind]
        wanted = ["-x PATH", "-x NCCL_DEBUG", "-x WANTED", f"{ssh_flag} '-o BatchMode=yes"]
        wanted += ["--bind-to none --map-by slot", "--host a:4,b:2"]
        assert [flag for flag in wanted if flag not in line] == []
        assert {"4": "--prtemca", "5": "plm_rsh_args"}[kind] not in line
    else:
        _, listed = line.split("-bind-to none -hosts a:4,b:2 -genvlist ")
        assert {"PATH", "NCCL_DEBUG", "WANTED"} <= set(listed.split()[0].split(","))
    assert "AWS_SECRET_ACCESS_KEY" not in line
    assert "hunter2" not in line


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ("", "-np 8 --min-np 1 "),
        ("--max-np 6", "-np 6 "),
        ("--min-np 9", "-np 9 "),
        ("--np 3", "-np 3 "),
    ],
)
def test_an_elastic_job_starts_with_the_listed_slots(
    options: str, ranks: str, printed: Printed
) -> None:
    """At most --max-np and at least --min-np."""
    Path("hosts").write_text("h1 slots=4\nh2 slots=4\n")
    line = printed(f"--elastic --hosts hosts {options} -- digits")
    assert ranks in line
    assert f"--host-discovery-script 'cat {Path('hosts').resolve()}'" in line


def test_an_elastic_job_finds_its_hosts(
    printed: Printed, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On this machine, or in the nodes of an allocation that are up."""
    line = printed("--elastic --np 3 -- digits")
    assert "--host-discovery-script 'echo localhost:3'" in line
    assert "-np 3 " in line
    states = r"printf 'n1:8 alloc\nn2:8 alloc*\nn3:8 down\nn4:8 mix\nn1:8 alloc\nn5:8 failg\n'"
    write_program(programs, "sinfo", states)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-5]")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    words = shlex.split(printed("--elastic --with slurm -- digits"))
    assert words[words.index("-np") + 1] == "16"
    script = words[words.index("--host-discovery-script") + 1]
    assert subprocess.check_output(["sh", "-c", script], text=True) == "n1:8\nn4:8\n"


@pytest.mark.parametrize(
    ("says", "accepts"),
    [
        ("echo user me; echo stricthostkeychecking ask; echo port 22", True),
        ("echo stricthostkeychecking accept-new", False),
        ("exit 255", False),
    ],
)
def test_new_host_keys_are_accepted_unless_the_user_has_configured_otherwise(
    says: str, accepts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Horovod, whose command starts the ranks, agrees."""
    from horovod.runner.util import remote

    host = f"host-{len(says)}"  # what ssh says of a host is asked once
    write_program(tmp_path, "ssh", f'[ "$*" = "-G -- {host}" ] || exit 9; {says}')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    option = ["-o", "StrictHostKeyChecking=accept-new"] if accepts else []
    assert ssh.options(host) == ["-o", "BatchMode=yes", "-o", "ConnectTimeout=5", *option]
    words = remote.get_ssh_command("true", host).split()
    assert words == ["ssh", "-o", "PasswordAuthentication=no", *option, "--", host, "true"]


def test_train_takes_the_launchers_options(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--np` and `--hosts`, before or after others, are short for `launch`; ranks refuse them."""
    execvp = Mock(side_effect=SystemExit(0))
    monkeypatch.setattr("os.execvp", execvp)
    for line in ("digits --np 3 --epochs 2", "digits --epochs 2 -np=3 --hosts localhost:3"):
        command(f"train {line}")
        _, words = execvp.call_args.args
        assert words[1:3] == ["-np", "3"]
        assert words[-3:] == ["digits", "--epochs", "2"]
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setenv("HOROVOD_SIZE", "1")
    printed = command("train digits --np 2", 2).err
    assert "horovodrun has started the ranks: leave out --np 2" in printed
