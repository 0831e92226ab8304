"""What the scripts start: how many ranks, where, and by which launcher."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support.scripts import LOCALHOST, PROGRAMS, PROJECT, SCRIPTS, dry_run, program

pytestmark = pytest.mark.integration


def test_local_dry_run_prints_the_command(tmp_path: Path) -> None:
    """train_local.sh puts the words after -- behind `hvd-train train`, and runs nothing with --dry-run."""
    words = dry_run("train_local.sh", "-n", "3", "--", "digits", "--epochs", "5", cwd=tmp_path)
    assert words == ["horovodrun", "-np", "3", "--gloo", "hvd-train", "train", "digits", "--epochs", "5"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", [["train_local.sh"], ["train_hostfile.sh", LOCALHOST]])
def test_mpi_is_handed_on(script: list[str | Path], tmp_path: Path) -> None:
    """--mpi chooses MPI in place of Gloo."""
    words = dry_run(*script, "--mpi", cwd=tmp_path)
    assert "--mpi" in words
    assert "--gloo" not in words


@pytest.mark.parametrize(("devices", "num_ranks"), [("0,1,2", 3), ("3", 1), ("0,-1,1", 1), ("GPU-1a,GPU-2b", 2)])
def test_one_rank_per_visible_gpu(devices: str, num_ranks: int, tmp_path: Path) -> None:
    """CUDA_VISIBLE_DEVICES gives the number of GPUs as CUDA reads it: none from a -1 on."""
    words = dry_run("train_local.sh", cwd=tmp_path, CUDA_VISIBLE_DEVICES=devices)
    assert words[:3] == ["horovodrun", "-np", str(num_ranks)]


def test_one_rank_per_gpu_that_the_driver_lists(tmp_path: Path) -> None:
    """Without CUDA_VISIBLE_DEVICES the GPUs of the driver's list count, and the parts of a divided GPU do not."""
    lines = [
        "GPU 0: NVIDIA H100 (UUID: GPU-1)",
        "  MIG 1g.10gb Device 0: (UUID: MIG-1)",
        "GPU 1: NVIDIA H100 (UUID: GPU-2)",
    ]
    driver = program(tmp_path / "nvidia-smi", f"printf '%s\\n' {shlex.join(lines)}")
    path = f"{driver.parent}:{PROGRAMS}:{os.environ['PATH']}"
    unset = ["env", "-u", "CUDA_VISIBLE_DEVICES", f"PATH={path}"]
    command = [*unset, str(SCRIPTS / "train_local.sh"), "--dry-run"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert shlex.split(result.stdout)[:3] == ["horovodrun", "-np", "2"]


@pytest.mark.parametrize(("cores", "num_ranks"), [(1, 1), (2, 2), (64, 2)])
def test_without_a_gpu_two_ranks_and_no_more_than_cores(cores: int, num_ranks: int, tmp_path: Path) -> None:
    """A machine without a GPU gets 2 ranks, or 1 on a single core; OMP_NUM_THREADS does not count."""
    pretended = program(tmp_path / "nproc", f'echo "${{OMP_NUM_THREADS:-{cores}}}"')
    path = f"{pretended.parent}:{PROGRAMS}:{os.environ['PATH']}"
    words = dry_run("train_local.sh", cwd=tmp_path, PATH=path, OMP_NUM_THREADS="7")
    assert words[:3] == ["horovodrun", "-np", str(num_ranks)]


def test_hostfile_slots_are_the_ranks(tmp_path: Path) -> None:
    """train_hostfile.sh starts as many ranks as all hosts have slots together."""
    hosts = tmp_path / "my hosts"
    hosts.write_text(
        "a slots=4\nb.example slots=3 max_slots=8\n10.0.0.1:08\r\n\nc # one slot\n# d slots=9\ne slots=1",
        encoding="utf-8",
    )
    words = dry_run("train_hostfile.sh", hosts, "--", "digits", cwd=tmp_path)
    assert words[:5] == ["horovodrun", "-np", "17", "--hostfile", str(hosts)]
    assert words[5:] == ["--gloo", "hvd-train", "train", "digits"]


@pytest.mark.parametrize("name", [path.name for path in sorted((PROJECT / "hostfiles").iterdir())])
def test_hostfiles_are_bare(name: str, tmp_path: Path) -> None:
    """Every host file of the project has only lines `NAME slots=N`, which any Horovod can read."""
    text = (PROJECT / "hostfiles" / name).read_text(encoding="utf-8")
    slots = [line.partition(" slots=") for line in text.splitlines()]
    assert all(host.strip() == host != "" and number.isdigit() for host, _, number in slots)
    words = dry_run("train_hostfile.sh", PROJECT / "hostfiles" / name, cwd=tmp_path)
    assert words[:3] == ["horovodrun", "-np", str(sum(int(number) for _, _, number in slots))]
