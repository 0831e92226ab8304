"""What the set-up finds missing on a machine."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
from environment_setup import headers
from environment_setup.disk import GIB, disk_problems
from environment_setup.preflight import (
    compiler_command,
    compiler_problems,
    driver_problems,
    machine_problems,
    python_problems,
)

from tests.support.programs import Program


def test_an_old_python_gets_the_name_of_a_newer_one(program: Program) -> None:
    """The line about an old Python names a newer one that runs on this machine."""
    program("python3.13", "exit 1")
    program("python3.12", "echo Python 3.12.1")
    (line,) = python_problems((3, 9))
    assert "Python 3.9 is too old" in line
    assert "make PYTHON=python3.12" in line


@pytest.mark.parametrize("version", [(3, 10), (3, 13), (3, 14)])
def test_supported_and_newer_pythons_are_taken(version: tuple[int, int]) -> None:
    """Python 3.10 and newer are accepted."""
    assert python_problems(version) == []


def test_no_compiler_says_what_to_type(program: Program) -> None:
    """A machine without a compiler gets a line that says how to install one."""
    assert compiler_command() == []
    (line,) = compiler_problems([])
    assert line.endswith("apt install g++")


def test_an_old_compiler_is_named_with_its_version(program: Program) -> None:
    """A g++ that is too old for C++20 is named before anything is downloaded."""
    program("g++", 'case "$1" in --version) echo g++ 10;; *) echo 10.2.1;; esac')
    (line,) = compiler_problems(compiler_command())
    assert "g++ 10.2.1 is too old" in line
    assert "CXX=g++-11" in line


def test_a_new_compiler_and_any_clang_are_taken(program: Program) -> None:
    """g++ 11 and clang are accepted, whatever version clang claims to be compatible with."""
    program("g++", 'case "$1" in --version) echo g++ 11;; *) echo 11.4.0;; esac')
    program("c++", 'case "$1" in --version) echo Debian clang version 16;; *) echo 4.2.1;; esac')
    assert compiler_problems(["g++"]) == []
    assert compiler_problems(["c++"]) == []


def test_cxx_that_is_not_there_is_named(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CXX that names no program is an error, even if there is another compiler."""
    program("g++", "echo 12")
    monkeypatch.setenv("CXX", "g++-99 -O1")
    (line,) = compiler_problems(compiler_command())
    assert "CXX names g++-99 -O1" in line


def test_headers_that_a_compiler_does_not_find_are_missing(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Python.h, and without Debian's tools to fetch it, a line says what to install."""
    program("g++", 'case "$1" in --version) echo g++;; -dump*) echo 12;; *) exit 1;; esac')
    monkeypatch.setattr(headers, "is_system_python", lambda: False)
    problems, fetch = machine_problems(venv_needed=False)
    assert not fetch
    assert [line for line in problems if "Python.h" in line and "-dev" in line] == problems


def test_headers_are_fetched_where_debian_can(
    program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Debian's own Python without headers is no problem for the user, since they are fetched without root."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program("g++", 'case "$1" in --version) echo g++;; -dump*) echo 12;; *) exit 1;; esac')
    program("apt-get", "exit 0")
    program("dpkg", "exit 0")
    monkeypatch.setattr(headers, "is_system_python", lambda: True)
    assert machine_problems(venv_needed=False) == ([], True)


@pytest.mark.parametrize("planted", ["hvd_train", "hvd_train/headers"])
def test_headers_of_another_user_are_refused(
    planted: str, program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Headers are compiled into what runs here: a line says whose folder it is, and what to type."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program("g++", 'case "$1" in -dump*) echo 12;; esac')
    folder = tmp_path / planted
    folder.parent.mkdir(exist_ok=True)
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    (line,) = machine_problems(venv_needed=False)[0]
    assert line.startswith(f"{folder}: it is a link")
    folder.unlink()
    folder.mkdir()
    assert machine_problems(venv_needed=False)[0] == []
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    (line,) = machine_problems(venv_needed=False)[0]
    assert "belongs to another user" in line
    assert "XDG_CACHE_HOME=" in line


def test_all_that_is_missing_is_reported_together(
    program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A missing compiler, venv module and headers are three lines of one answer."""
    monkeypatch.setattr(headers, "is_system_python", lambda: False)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # a set-up may have fetched headers into the real one
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    problems, _ = machine_problems(venv_needed=True)
    assert len(problems) == 3
    assert all("apt install" in line for line in problems)


def test_too_little_disk_space_is_reported_for_a_whole_file_system(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Needs on the same file system add up, and enough space is no problem."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=8 * GIB))
    assert disk_problems({tmp_path / "a": 5.0}) == []
    (line,) = disk_problems({tmp_path / "a": 5.0, tmp_path / "b" / "c": 4.0})
    assert "8.0 GB free" in line
    assert "up to 9 GB" in line


@pytest.mark.parametrize(
    ("driver", "variables", "says"),
    [
        ("550.54.14", {}, "the NVIDIA driver is 550.54.14, and torch for CUDA 13 needs 580 or newer"),
        ("550.54.14", {"HVD_TRAIN_GPUS": "no"}, None),
        ("550.54.14", {"HVD_TRAIN_HASHES": "no"}, None),
        ("580.65.06", {}, None),
        (None, {}, None),
    ],
)
def test_a_driver_that_is_too_old_is_told_before_anything_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str | None, variables: dict[str, str], says: str | None
) -> None:
    """With what to type for training on the CPU; another torch, or no GPU at all, is no problem."""
    monkeypatch.delenv("HVD_TRAIN_GPUS", raising=False)
    monkeypatch.delenv("HVD_TRAIN_HASHES", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    device, version = tmp_path / "nvidia0", tmp_path / "version"
    constraints = Path(__file__).parents[3] / "requirements" / "constraints.txt"
    version.write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Thu Feb 22 01:44:30 UTC 2024\n")
    assert driver_problems(constraints, device, version) == [], "without a device"
    device.touch()
    problems = driver_problems(constraints, device, version)
    assert len(problems) == (says is not None)
    assert all(line.startswith(says or "") and "HVD_TRAIN_GPUS=no make" in line for line in problems)
