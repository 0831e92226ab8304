"""The set-up of the environment: what it finds missing, what it installs by which digests, what it repeats."""

from __future__ import annotations

import ast
import os
import platform
import shutil
import sys
import sysconfig
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from environment_setup import headers
from environment_setup.checkout import Checkout, Choice, find_choice, locks, step_keys
from environment_setup.disk import GIB, disk_problems
from environment_setup.preflight import compiler_command, compiler_problems, machine_problems, python_problems
from environment_setup.state import STAMP, Stamp, drop_half_installed, why_anew
from environment_setup.steps import Setup, SetupError

from tests.support.programs import Program, write_program

PACKAGING = Path(__file__).resolve().parents[3] / "packaging"


def test_an_old_python_gets_a_message(program: Program) -> None:
    for path in [PACKAGING / "environment.py", *(PACKAGING / "environment_setup").glob("*.py")]:
        ast.parse(path.read_text(), feature_version=(3, 6))
    program("python3.13", "exit 1")
    program("python3.12", "echo Python 3.12.1")
    (line,) = python_problems((3, 9))
    assert "Python 3.9 is too old" in line
    assert "make PYTHON=python3.12" in line
    assert python_problems((3, 10)) == python_problems((3, 14)) == []


def test_a_compiler_that_will_not_do_is_named(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = compiler_problems(compiler_command())
    assert line.endswith("apt install g++")
    program("g++", 'case "$1" in --version) echo g++ 10;; *) echo 10.2.1;; esac')
    (line,) = compiler_problems(compiler_command())
    assert "g++ 10.2.1 is too old" in line
    assert "CXX=g++-11" in line
    program("g++", 'case "$1" in --version) echo g++ 11;; *) echo 11.4.0;; esac')
    program("c++", 'case "$1" in --version) echo Debian clang version 16;; *) echo 4.2.1;; esac')
    assert compiler_problems(["g++"]) == compiler_problems(["c++"]) == []
    monkeypatch.setenv("CXX", "g++-99 -O1")
    (line,) = compiler_problems(compiler_command())
    assert "CXX names g++-99 -O1" in line


def test_all_that_is_missing_is_reported_at_once(
    program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(headers, "is_system_python", lambda: False)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "ensurepip", None)
        problems, _ = machine_problems(venv_needed=True)
    assert len(problems) == 3
    assert all("apt install" in line for line in problems)
    program("g++", 'case "$1" in --version) echo g++;; -dump*) echo 12;; *) exit 1;; esac')
    ((line,), fetch) = machine_problems(venv_needed=False)
    assert "Python.h" in line and not fetch
    program("apt-get", "exit 0")
    program("dpkg", "exit 0")
    monkeypatch.setattr(headers, "is_system_python", lambda: True)
    assert machine_problems(venv_needed=False) == ([], True)


def test_headers_of_another_user_are_refused(program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program("g++", 'case "$1" in -dump*) echo 12;; esac')
    for folder in (tmp_path / "hvd_train", tmp_path / "hvd_train" / "headers"):
        folder.symlink_to(tmp_path)
        (line,) = machine_problems(venv_needed=False)[0]
        assert line.startswith(f"{folder}: it is a link")
        folder.unlink()
        folder.mkdir()
        assert machine_problems(venv_needed=False)[0] == []
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    (line,) = machine_problems(venv_needed=False)[0]
    assert "belongs to another user" in line
    assert "XDG_CACHE_HOME=" in line


def test_too_little_disk_space_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=8 * GIB))
    assert disk_problems({tmp_path / "a": 5.0}) == []
    (line,) = disk_problems({tmp_path / "a": 5.0, tmp_path / "b" / "c": 4.0})
    assert "8.0 GB free" in line
    assert "up to 9 GB" in line


def test_the_mpi_and_cuda_of_the_machine_are_used(
    checkout: Checkout, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = program("nvcc", "echo Cuda compilation tools, release 13.0, V13.0.88")
    monkeypatch.delenv("HOROVOD_CUDA_HOME", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parent.parent))
    mpicxx = program("mpicxx", "exit 0")
    assert find_choice(checkout).requirement_files() == ["run.txt", "build.txt", "dev.txt"]
    program("nvcc", "echo Cuda compilation tools, release 12.4, V12.4.1")
    own = checkout.venv / "bin"
    own.mkdir(parents=True)
    shutil.move(mpicxx, own)
    monkeypatch.setenv("PATH", f"{own}{os.pathsep}{nvcc.parent}")
    assert {"mpi.txt", "nvcc.txt"} <= set(find_choice(checkout).requirement_files())


def test_a_step_is_repeated_when_its_inputs_change(checkout: Checkout) -> None:
    before = keys = step_keys(checkout, Choice("/opt/a/bin/mpicxx", None), "3.11.7")
    for file, redone in {
        "requirements/constraints.txt": {"packages", "horovod", "project"},
        "packaging/patches/C1.patch": {"horovod"},
        "packaging/horovod_sources/horovod/common/new.cc": {"horovod"},
        "packaging/horovod_build/plan.py": {"horovod"},
        "pyproject.toml": {"project"},
        "hvd_train/data/jpeg_region.c": {"project"},
        "README.md": set(),
    }.items():
        with (checkout.root / file).open("a") as text:
            text.write("more")
        after = step_keys(checkout, Choice("/opt/a/bin/mpicxx", None), "3.11.7")
        assert {name for name in keys if keys[name] != after[name]} == redone, file
        keys = after
    other = step_keys(checkout, Choice("/opt/b/bin/mpicxx", None), "3.11.7")
    assert keys["packages"] == other["packages"]
    assert keys["horovod"] != other["horovod"]
    assert not set(before.values()) & set(step_keys(checkout, Choice("/opt/a/bin/mpicxx", None), "3.12.1").values())


def make_environment(checkout: Checkout, version: str = "3.11.7", libraries: str = "python3.11") -> Path:
    site = checkout.venv / "lib" / libraries / "site-packages"
    for name in ("torch-2.15.0", "torchvision-0.29.2", "horovod-0.28.1", "hvd_train-0.1.0"):
        (site / f"{name}.dist-info").mkdir(parents=True)
        (site / f"{name}.dist-info" / "RECORD").touch()
    write_program(checkout.python.parent, checkout.python.name, f"echo {version}")
    return site


def test_only_unfinished_steps_are_repeated(checkout: Checkout) -> None:
    version = platform.python_version()
    site = make_environment(checkout, version, f"python{version.rpartition('.')[0]}")
    setup, stamp = Setup(checkout, None, lock=None), Stamp(checkout.venv)
    keys = step_keys(checkout, setup.choice, version)
    assert not setup.is_complete()
    for name, key in keys.items():
        stamp.mark(name, key)
    assert setup.is_complete()
    stamp.forget("horovod")  # as a step does when it begins
    assert not Stamp(checkout.venv).is_done("horovod", keys["horovod"])
    assert Stamp(checkout.venv).is_done("packages", keys["packages"])
    stamp.mark("horovod", keys["horovod"])
    (site / "horovod-0.28.1.dist-info" / "RECORD").unlink()  # pip writes it last
    assert drop_half_installed(site) == ["horovod"]
    assert not setup.is_complete()
    for damaged in ("", "{", "[]", '{"done": 3}', '{"place": "x", "done": {}}'):
        (checkout.venv / STAMP).write_text(damaged)
        assert not Stamp(checkout.venv).is_done("packages", keys["packages"])


def test_an_environment_that_does_not_run_is_made_again(checkout: Checkout, tmp_path: Path) -> None:
    assert why_anew(checkout, None) == ""
    make_environment(checkout)
    assert why_anew(checkout, None) is None
    assert "PYTHON names 3.12" in why_anew(checkout, (3, 12))
    checkout.python.write_text("#!/bin/sh\necho 3.9.2\n")
    assert "Python 3.9.2" in why_anew(checkout, None)
    checkout.python.write_text("#!/bin/sh\necho 3.13.0\n")
    assert "another Python" in why_anew(checkout, None)
    checkout.python.write_text("#!/bin/sh\necho 3.11.7\n")
    Stamp(checkout.venv).mark("packages", "1")
    moved = Checkout(checkout.root.rename(tmp_path / "elsewhere"))
    assert "it was made at" in why_anew(moved, None)
    moved.python.unlink()
    moved.python.symlink_to("/nowhere/python3")
    assert "does not run" in why_anew(moved, None)


PYTHON = f"python{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.fixture
def setup(checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """Return a set-up whose index is a folder with one wheel; its pip only says what it would install."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "harmless-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("harmless.py", "")
        wheel.writestr("harmless-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: harmless\nVersion: 1\n")
        wheel.writestr("harmless-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("harmless-1.dist-info/RECORD", "")
    requirements = checkout.root / "requirements"
    (requirements / PYTHON).mkdir()
    for file in requirements.glob("*.txt"):
        file.write_text("")
        (requirements / PYTHON / file.name).write_text("")
    (requirements / "run.txt").write_text("harmless\n")
    (requirements / PYTHON / "run.txt").write_text(f"harmless==1 --hash=sha256:{'0' * 64}\n")
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_DRY_RUN": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(Setup, "pip", lambda self, *arguments: [sys.executable, "-m", "pip", *arguments])
    with (tmp_path / "lock").open("w") as file:
        yield Setup(checkout, None, file)


def test_only_locked_files_are_installed(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel of another digest and one that no lock names are refused; HVD_TRAIN_HASHES=no takes versions."""
    site = setup.checkout.venv / "lib" / PYTHON / "site-packages"
    (site / "torch-1.dist-info").mkdir(parents=True)
    (site / "torch-1.dist-info" / "RECORD").touch()
    setup.checkout.log.parent.mkdir()
    setup.own_temporary.mkdir(parents=True)
    with setup.checkout.log.open("wb") as log:
        with pytest.raises(SetupError, match=r"other files than those whose digests(.|\n)*HVD_TRAIN_HASHES=no make"):
            setup.install_packages(log, site)
        (setup.checkout.root / "requirements" / PYTHON / "run.txt").write_text("harmless==1\n")
        with pytest.raises(SetupError):
            setup.install_packages(log, site)
        monkeypatch.setenv("HVD_TRAIN_HASHES", "no")
        setup.install_packages(log, site)
    assert setup.checkout.log.read_text().count("Would install harmless-1") == 1


def test_other_processors_have_versions_without_digests(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkout.root / "requirements" / "python3.11"
    folder.mkdir()
    for name in Choice(None, None).requirement_files():
        (folder / name).touch()
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert (locks(checkout, "3.11.7"), locks(checkout, "3.14.0")) == (folder, None)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert locks(checkout, "3.11.7") is None
