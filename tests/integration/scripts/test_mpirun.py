"""Each mpirun has flags of its own, and is told where it is on other hosts."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from tests.support.scripts import LOCALHOST, dry_run, program, run

pytestmark = pytest.mark.integration


VERSIONS = {
    "4": "mpirun (Open MPI) 4.1.8",
    "5": "mpirun (Open MPI) 5.0.9",
    "mpich": "HYDRA build details:\n    Version: 4.3.2",
    "intel": "Intel(R) MPI Library for Linux* OS, Version 2021.17",
}


@pytest.mark.parametrize("kind", VERSIONS)
def test_each_mpirun_gets_its_own_flags(kind: str, tmp_path: Path, system_only: str) -> None:
    """Each mpirun gets hosts, slots, needed variables, no binding to cores, and an ssh that never prompts."""
    folder = tmp_path / "programs"
    for name in ("horovodrun", "hvd-train"):
        program(folder / name, "exit 9")
    program(folder / "mpirun", f"printf '%s\\n' {shlex.quote(VERSIONS[kind])}")
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=4\nb:2\n", encoding="utf-8")
    environment = {
        "PATH": f"{folder}:{system_only}:{os.environ['PATH']}",
        "NCCL_DEBUG": "INFO",
        "MPIRUN_FLAGS": "--tag x",
        **dict.fromkeys(("WANTED", "AWS_SECRET_ACCESS_KEY"), "hunter2"),
    }
    arguments = [hosts, "--env", "WANTED", "--", "digits", "--epochs", "5"]
    words = dry_run("train_mpirun.sh", *arguments, cwd=tmp_path, **environment)
    assert words[:6] == ["HVD_TRAIN_ENV=WANTED", "mpirun", "-np", "6", "--tag", "x"]
    assert words[-5:] == [str(folder / "hvd-train"), "train", "digits", "--epochs", "5"]
    line = " ".join(words)
    if kind in ("4", "5"):
        assert "-x PATH" in line
        assert "-x NCCL_DEBUG" in line
        assert "-x WANTED" in line
        assert "--bind-to none --map-by slot" in line
        assert "--host a:4,b:2" in line
        assert ("--mca plm_rsh_args -o BatchMode=yes" in line) == (kind == "4")
        assert ("--prtemca plm_ssh_args -o BatchMode=yes" in line) == (kind == "5")
    else:
        assert "-bind-to none -hosts a:4,b:2 -genvlist" in line
        assert {"PATH", "NCCL_DEBUG", "WANTED"} <= set(words[words.index("-genvlist") + 1].split(","))
    assert "AWS_SECRET_ACCESS_KEY" not in line
    assert "hunter2" not in line


def test_an_mpirun_that_nobody_knows(tmp_path: Path, system_only: str) -> None:
    """An unknown mpirun is refused, with its version text."""
    folder = tmp_path / "programs"
    for name, text in (("horovodrun", "exit 9"), ("hvd-train", "exit 9"), ("mpirun", "echo mpirun of the moon 7")):
        program(folder / name, text)
    path = f"{folder}:{system_only}:{os.environ['PATH']}"
    result = run("train_mpirun.sh", LOCALHOST, cwd=tmp_path, PATH=path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "train_mpirun.sh: this mpirun is neither Open MPI's nor MPICH's: mpirun of the moon 7\n"


def test_mpi_is_told_where_it_is_on_other_hosts(tmp_path: Path, system_only: str) -> None:
    """An Open MPI beside horovodrun gets its own folder and orted on other hosts, unless the user has set them."""
    folder = tmp_path / "an environment" / "bin"
    for name in ("horovodrun", "hvd-train", "orted", "python"):
        program(folder / name, "exit 9")
    path = f"{folder}:{system_only}"
    chosen = {"PATH": path, "OMPI_MCA_orte_launch_agent": "my-orted", "OPAL_PREFIX": "/my/mpi"}
    prefix = f"OPAL_PREFIX={folder.parent}"
    expected = [
        "env",
        prefix,
        f"OMPI_MCA_orte_launch_agent='{folder}/orted'",
        "horovodrun",
    ]
    assert dry_run("train_hostfile.sh", LOCALHOST, "--mpi", cwd=tmp_path, PATH=path)[:4] == expected
    assert dry_run("train_hostfile.sh", LOCALHOST, "--mpi", cwd=tmp_path, **chosen)[0] == "horovodrun"
    assert dry_run("train_hostfile.sh", LOCALHOST, "--gloo", cwd=tmp_path, PATH=path)[0] == "horovodrun"
