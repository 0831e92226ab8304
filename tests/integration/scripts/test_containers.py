"""Containers, by Apptainer on one machine or under Slurm, and by docker on each host."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.scripts import AWKWARD, PROJECT, PYTHON, dry_run, program, run

pytestmark = pytest.mark.integration


def test_apptainer(tmp_path: Path, system_only: str) -> None:
    """One machine gets one container with horovodrun; a Slurm allocation gets srun with a container for each task."""
    folder, image = tmp_path / "programs", tmp_path / "an image.sif"
    program(folder / "apptainer", "exit 9")
    image.touch()
    path = f"{folder}:{system_only}"
    inside = ["apptainer", "exec", "--bind", "/scratch", str(image)]
    words = dry_run(
        "train_apptainer.sh", image, "--bind", "/scratch", "-n", "3", "--", "digits", cwd=tmp_path, PATH=path
    )
    assert words == [*inside, "horovodrun", "-np", "3", "--gloo", "hvd-train", "train", "digits"]
    words = dry_run(
        "train_apptainer.sh", image, "--bind", "/scratch", "--", "digits", cwd=tmp_path, PATH=path, SLURM_NTASKS="8"
    )
    assert words == ["srun", *inside, "hvd-train", "train", "digits"]
    words = dry_run("train_apptainer.sh", image, cwd=tmp_path, PATH=path, CUDA_VISIBLE_DEVICES="0,1")
    assert words[:6] == ["apptainer", "exec", "--nv", str(image), "horovodrun", "-np"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which image?"),
        (["none.sif"], "there is no image none.sif"),
        (["-n", "0"], "takes a number of ranks from 1, not '0'"),
        (["here.sif"], "there is neither apptainer nor singularity on the PATH"),
    ],
)
def test_apptainer_that_cannot_start(arguments: list[str], message: str, tmp_path: Path, system_only: str) -> None:
    """Wrong arguments, a missing image or a missing program are one line with exit code 2."""
    (tmp_path / "here.sif").touch()
    result = run("train_apptainer.sh", *arguments, cwd=tmp_path, PATH=system_only)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr


@pytest.fixture
def containers(tmp_path: Path) -> tuple[dict[str, str], Callable[[], list[list[str]]]]:
    """Return an environment whose docker and ssh only write down their arguments, and a function that reads them."""
    folder, log = tmp_path / "bin", tmp_path / "docker.log"
    # What ssh does with its words: it joins them, and a shell takes them apart.
    program(folder / "ssh", 'while [ "$1" != -- ]; do shift; done; shift; export ON=$1; shift; exec sh -c "$*"')
    # A line is one write: two containers may be taken away at once, and print() writes the end of a line apart where
    # PYTHONUNBUFFERED is set.
    dump = (
        "import json, os, sys; os.write(1, (json.dumps([os.getenv('ON', 'here'), *sys.argv[1:]]) + chr(10)).encode())"
    )
    program(folder / "docker", f'[ "$1" != cp ] || cat > {tmp_path}/cp.tar; exec {PYTHON} -c "{dump}" "$@" >> {log}')
    program(folder / "nvidia-smi", "exit 9")

    def calls() -> list[list[str]]:
        return [json.loads(line) for line in log.read_text().splitlines()]

    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}, calls


def test_docker(containers: tuple[dict[str, str], Callable[[], list[list[str]]]], tmp_path: Path) -> None:
    """A container runs on each host, with the key in a file and the arguments as typed, and is removed at the end."""
    environment, read_calls = containers
    (tmp_path / "hosts").write_text("localhost slots=1\nother slots=2\n")
    options = ["--volume", "/data:/data:ro", "--runs", "my runs", "--env", "WANTED"]
    environment["WANTED"] = "hunter2"
    result = run("train_docker.sh", "hosts", *options, "--", *AWKWARD, cwd=tmp_path, **environment)
    assert result.returncode == 0, result.stderr
    calls = read_calls()
    assert [(call[0], call[1]) for call in calls] == [
        *(("other", verb) for verb in ("create", "cp", "start", "exec")),
        *(("here", verb) for verb in ("create", "cp", "start")),
        *calls_of(calls[-2:]),
    ]
    assert sorted(calls_of(calls[-2:])) == [("here", "rm"), ("other", "rm")]
    assert calls[0][-2:] == ["hvd_train", "host"]
    launcher = calls[4]
    assert launcher[-len(AWKWARD) :] == AWKWARD
    assert launcher[launcher.index("hvd_train", launcher.index("--volume")) + 1 :][:5] == [
        "train_hostfile.sh", "/etc/hvd_train/ssh/hostfile", "--env", "WANTED", "--"
    ]  # fmt: skip
    assert [launcher[at + 1] for at, word in enumerate(launcher) if word == "--env"][1:] == ["WANTED", "WANTED"]
    assert "WANTED" not in calls[0]
    assert not any("hunter2" in word for call in calls for word in call)
    assert f"{tmp_path}/my runs:/home/trainer/runs" in launcher
    assert (tmp_path / "my runs").stat().st_mode & 0o022 == 0, "others can write there"
    copied = subprocess.run(["tar", "tvf", tmp_path / "cp.tar"], capture_output=True, text=True, check=True).stdout
    assert re.search(r"-rw------- 1000/1000 .* \./id_ed25519\n", copied)
    assert "PRIVATE KEY" not in result.stdout + result.stderr


@pytest.mark.parametrize(("gpus", "infiniband"), [(True, True), (True, False), (False, False)])
def test_docker_gives_nccl_what_it_needs(
    containers: tuple[dict[str, str], Callable[[], list[list[str]]]], tmp_path: Path, gpus: bool, infiniband: bool
) -> None:
    """GPUs, and where there are RDMA devices these, with as much locked memory as NCCL asks for."""
    environment, _ = containers
    devices = tmp_path / "infiniband"
    if infiniband:
        devices.mkdir()
    scripts = tmp_path / "horovodrun_scripts"
    shutil.copytree(PROJECT / "horovodrun_scripts", scripts)
    script = scripts / "train_docker.sh"
    script.write_text(script.read_text().replace("/dev/infiniband", str(devices)))
    program(tmp_path / "bin" / "nvidia-smi", "echo 'GPU 0: one'" if gpus else "exit 9")
    command = [script, PROJECT / "hostfiles/two_hosts", "--dry-run"]
    environment = {name: value for name, value in {**os.environ, **environment}.items() if name[:4] != "CUDA"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    creates = [line.replace("\\", "") for line in done.stdout.splitlines() if "create" in line]
    assert len(creates) >= 2
    for line in creates:
        assert ("--gpus all --ulimit stack=67108864 " in line) is gpus
        assert (f"--device {devices} --ulimit memlock=-1 " in line) is infiniband


def calls_of(calls: list[list[str]]) -> list[tuple[str, str]]:
    return [(call[0], call[1]) for call in calls]


def test_docker_dry_run(containers: tuple[dict[str, str], Callable[[], list[list[str]]]], tmp_path: Path) -> None:
    """Every command is printed as it can be typed, and none is run."""
    environment, _ = containers
    result = run(
        "train_docker.sh", PROJECT / "hostfiles/two_hosts", "--dry-run", "--elastic", cwd=tmp_path, **environment
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert not (tmp_path / "docker.log").exists()
    lines = result.stdout.splitlines()
    assert any(line.startswith("ssh -o BatchMode=yes -o ConnectTimeout=5 -- h1 docker\\ create") for line in lines)
    assert lines[-1].startswith("docker start --attach hvd_train-")
    assert any("train_elastic.sh --hosts /etc/hvd_train/ssh/hostfile --" in line for line in lines)
