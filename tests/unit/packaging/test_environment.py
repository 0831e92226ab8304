"""The set-up of the environment: what it finds missing, what it installs by which digests, what it repeats."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.programs import Program, write_program

REPOSITORY = Path(__file__).resolve().parents[3]
PYTHON = f"python{sys.version_info[0]}.{sys.version_info[1]}"
TOOLS = (
    *("awk", "bash", "cat", "cut", "df", "dirname", "du", "find", "flock", "grep", "head", "make", "mkdir", "mv"),
    *("realpath", "rm", "sed", "sleep", "stat", "tail", "touch", "true", "uname"),
)
BACKEND = """
import shutil
def build_editable(folder, config_settings=None, metadata_directory=None):
    return shutil.copy("../wheels/project-1-py3-none-any.whl", folder).rpartition("/")[2]
"""


def make_clone(folder: Path) -> Path:
    """Make a clone with the real set-up; its package index has three small wheels, and its Horovod is a line."""
    clone, wheels = folder / "a clone", folder / "wheels"
    wheels.mkdir(parents=True)
    for name in ("harmless", "project", "wheel"):
        with zipfile.ZipFile(wheels / f"{name}-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}-1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
            about = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            wheel.writestr(f"{name}-1.dist-info/WHEEL", about)
            wheel.writestr(f"{name}-1.dist-info/RECORD", "")
    for made in ("packaging/patches", f"requirements/{PYTHON}"):
        (clone / made).mkdir(parents=True)
    for file in ("Makefile", "packaging/environment.sh"):
        shutil.copy(REPOSITORY / file, clone / file)
    for name in ("run", "build", "dev", "nvcc", "mpi"):
        (clone / "requirements" / f"{name}.txt").touch()
        (clone / "requirements" / PYTHON / f"{name}.txt").touch()
    (clone / "requirements" / "constraints.txt").write_text("cuda-toolkit==13.2.2\n")
    (clone / "requirements" / "run.txt").write_text("harmless\n")
    digest = hashlib.sha256((wheels / "harmless-1-py3-none-any.whl").read_bytes()).hexdigest()
    (clone / "requirements" / PYTHON / "run.txt").write_text(f"harmless==1 --hash=sha256:{digest}\n")
    (clone / "packaging" / "build_horovod.py").write_text("print('horovod: built')\n")
    (clone / "packaging" / "patches" / "C1.patch").touch()
    (clone / "pyproject.toml").write_text('[build-system]\nrequires = []\nbuild-backend = "own"\nbackend-path = ["."]\n')
    (clone / "own.py").write_text(BACKEND)
    return clone


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return variables for a machine with only the tools of the set-up, this Python and a g++ that finds Python.h."""
    folder = tmp_path_factory.mktemp("bin")
    for tool in TOOLS:
        (folder / tool).symlink_to(shutil.which(tool) or tool)
    for name in ("python3", PYTHON):
        (folder / name).symlink_to(Path(sys.executable).resolve())
    write_program(folder, "g++", 'case "$1" in --version) echo g++;; -dump*) echo 12.2.0;; esac')
    return {"PATH": str(folder), "HOME": str(folder), "PIP_NO_INDEX": "1"}


@pytest.fixture
def program(environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Return a function that puts a script before the tools of the machine."""
    monkeypatch.setitem(environ, "PATH", f"{tmp_path / 'bin'}{os.pathsep}{environ['PATH']}")
    return lambda name, body: write_program(tmp_path / "bin", name, body)


def make(clone: Path, environ: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**environ, "PIP_FIND_LINKS": str(clone.parent / "wheels")}
    command = ["make", "--no-print-directory", "env", *arguments]
    return subprocess.run(command, cwd=clone, env=environ, capture_output=True, text=True, check=False)


def steps(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return which steps of a set-up that succeeded were run."""
    assert done.returncode == 0, done.stderr
    names = ("creating", "pinned", "horovod: built", "hvd_train")
    return [name for name in names if name in done.stdout]


@pytest.fixture(scope="module")
def clone(environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a clone that is set up. (Making an environment takes seconds, so tests share it.)"""
    clone = make_clone(tmp_path_factory.mktemp("clones"))
    assert steps(make(clone, environ)) == ["creating", "pinned", "horovod: built", "hvd_train"]
    return clone


def test_a_step_is_repeated_when_its_inputs_change(clone: Path, environ: dict[str, str]) -> None:
    assert make(clone, environ).stdout == ""
    for file, repeated in {
        "requirements/run.txt": ["pinned", "horovod: built", "hvd_train"],
        "packaging/patches/C1.patch": ["horovod: built"],
        "pyproject.toml": ["hvd_train"],
        "README.md": [],
    }.items():
        (clone / file).touch()
        assert steps(make(clone, environ)) == repeated, file
    (clone / "packaging" / "patches" / "C1.patch").unlink()
    assert steps(make(clone, environ)) == ["horovod: built"]
