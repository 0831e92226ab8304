"""What a set-up takes as done, and what it repeats."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from environment_setup.checkout import Checkout, Choice, find_choice, step_keys
from environment_setup.state import STAMP, Stamp, drop_half_installed, made_at, why_anew
from environment_setup.steps import Setup

from tests.support.programs import Program, write_program


def make_environment(checkout: Checkout, version: str = "3.11.7", libraries: str = "python3.11") -> Path:
    """Make an environment as far as a set-up looks at it: a Python that prints its version, and packages."""
    site = checkout.venv / "lib" / libraries / "site-packages"
    for name in ("torch-2.15.0", "torchvision-0.29.2", "horovod-0.28.1", "hvd_train-0.1.0"):
        (site / f"{name}.dist-info").mkdir(parents=True)
        (site / f"{name}.dist-info" / "RECORD").touch()
    write_program(checkout.python.parent, checkout.python.name, f"echo {version}")
    return site


def test_the_machines_own_mpi_and_cuda_are_used(
    checkout: Checkout, program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With mpicxx on the PATH and an nvcc of torch's generation in CUDA_HOME, neither comes from the package index."""
    nvcc = program("nvcc", "echo Cuda compilation tools, release 13.0, V13.0.88")
    monkeypatch.delenv("HOROVOD_CUDA_HOME", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parent.parent))
    program("mpicxx", "exit 0")
    choice = find_choice(checkout)
    assert choice.requirement_files() == ["run.txt", "build.txt", "dev.txt"]


def test_an_mpi_of_the_environment_is_not_the_machines(
    checkout: Checkout, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mpicxx of an active environment and an nvcc of another generation do not count as the machine's."""
    nvcc = program("nvcc", "echo Cuda compilation tools, release 12.4, V12.4.1")
    monkeypatch.delenv("HOROVOD_CUDA_HOME", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parent.parent))
    own = checkout.venv / "bin"
    own.mkdir(parents=True)
    shutil.copy(program("mpicxx", "exit 0"), own)
    (nvcc.parent / "mpicxx").unlink()
    monkeypatch.setenv("PATH", f"{own}{os.pathsep}{nvcc.parent}")
    choice = find_choice(checkout)
    assert {"mpi.txt", "nvcc.txt"} <= set(choice.requirement_files())


@pytest.mark.parametrize(
    ("file", "redone"),
    [
        ("requirements/constraints.txt", {"packages", "horovod", "project"}),
        ("requirements/mpi.txt", {"packages", "horovod", "project"}),
        ("packaging/patches/C1.patch", {"horovod"}),
        ("packaging/horovod_sources/horovod/common/new.cc", {"horovod"}),
        ("packaging/build_horovod.py", {"horovod"}),
        ("packaging/horovod_build/plan.py", {"horovod"}),
        ("packaging/hook.cmake", {"horovod"}),
        ("pyproject.toml", {"project"}),
        ("hvd_train/data/jpeg_region.c", {"project"}),
        ("hvd_train/data/jpeg_resize.h", {"project"}),
        ("README.md", set()),
    ],
)
def test_a_step_is_done_again_when_what_it_depends_on_changes(checkout: Checkout, file: str, redone: set[str]) -> None:
    """A changed file changes the keys of the steps that read it, and no others."""
    choice = Choice(None, None)
    before = step_keys(checkout, choice, "3.11.7")
    with (checkout.root / file).open("a") as text:
        text.write("more")
    after = step_keys(checkout, choice, "3.11.7")
    assert {name for name in before if before[name] != after[name]} == redone


def test_another_mpi_or_python_changes_the_keys(checkout: Checkout) -> None:
    """Another MPI changes the key of Horovod, and another Python all keys."""
    one = step_keys(checkout, Choice("/opt/a/bin/mpicxx", None), "3.11.7")
    other = step_keys(checkout, Choice("/opt/b/bin/mpicxx", None), "3.11.7")
    assert one["packages"] == other["packages"]
    assert one["horovod"] != other["horovod"]
    newer = step_keys(checkout, Choice("/opt/a/bin/mpicxx", None), "3.12.1")
    assert not set(one.values()) & set(newer.values())


def test_a_finished_environment_is_complete_and_a_changed_one_is_not(checkout: Checkout) -> None:
    """An environment is complete if all steps have their keys and all packages are there, and not if one is missing."""
    version = platform.python_version()
    site = make_environment(checkout, version, f"python{version.rpartition('.')[0]}")
    setup = Setup(checkout, None, lock=None)
    assert not setup.is_complete()
    for name, key in step_keys(checkout, setup.choice, version).items():
        Stamp(checkout.venv).mark(name, key)
    assert setup.is_complete()
    shutil.rmtree(site / "horovod-0.28.1.dist-info")
    assert not setup.is_complete()


def test_a_step_that_began_is_not_done(checkout: Checkout) -> None:
    """The stamp forgets a step that was interrupted, but not the ones before it."""
    make_environment(checkout)
    stamp = Stamp(checkout.venv)
    stamp.mark("packages", "1")
    stamp.mark("horovod", "2")
    stamp.forget("horovod")
    again = Stamp(checkout.venv)
    assert again.is_done("packages", "1")
    assert not again.is_done("horovod", "2")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"done": 3}', '{"place": "x", "done": {}}'])
def test_a_damaged_stamp_means_that_nothing_is_done(checkout: Checkout, content: str) -> None:
    """A stamp that cannot be read counts as none."""
    make_environment(checkout)
    (checkout.venv / STAMP).write_text(content)
    assert not Stamp(checkout.venv).is_done("packages", "1")


def test_the_stamp_is_replaced_whole(checkout: Checkout) -> None:
    """The stamp is written to another file and renamed, so that a killed set-up leaves the old or the new one."""
    make_environment(checkout)
    Stamp(checkout.venv).mark("packages", "1")
    assert json.loads((checkout.venv / STAMP).read_text())["done"] == {"packages": "1"}
    assert [path.name for path in checkout.venv.glob("*.part")] == []


def test_a_missing_environment_is_made_without_a_reason(checkout: Checkout) -> None:
    """A missing or empty .venv is made without giving a reason."""
    assert why_anew(checkout, None) == ""
    checkout.venv.mkdir()
    assert why_anew(checkout, None) == ""


def test_a_good_environment_is_kept(checkout: Checkout) -> None:
    """An environment that runs is kept, even if it was made by hand or has another supported Python."""
    make_environment(checkout)
    assert why_anew(checkout, None) is None
    assert why_anew(checkout, (3, 11)) is None


def test_a_broken_python_is_noticed(checkout: Checkout) -> None:
    """An environment whose Python is gone is made again."""
    make_environment(checkout)
    checkout.python.unlink()
    checkout.python.symlink_to("/nowhere/python3")
    assert "does not run" in why_anew(checkout, None)


def test_another_python_is_noticed(checkout: Checkout) -> None:
    """An environment is made again for another chosen Python, a Python too old, or packages of another Python."""
    make_environment(checkout)
    assert "PYTHON names 3.12" in why_anew(checkout, (3, 12))
    checkout.python.write_text("#!/bin/sh\necho 3.9.2\n")
    assert "Python 3.9.2" in why_anew(checkout, None)
    checkout.python.write_text("#!/bin/sh\necho 3.13.0\n")
    assert "another Python" in why_anew(checkout, None)


def test_a_moved_environment_is_noticed(checkout: Checkout, tmp_path: Path) -> None:
    """An environment that was moved is made again, since its commands hold its old path."""
    make_environment(checkout)
    Stamp(checkout.venv).mark("packages", "1")
    assert why_anew(checkout, None) is None
    moved = Checkout(checkout.root.rename(tmp_path / "elsewhere"))
    assert "it was made at" in why_anew(moved, None)


def test_a_real_environment_knows_its_place(tmp_path: Path) -> None:
    """The folder of an environment without a stamp is read from its activate script, even with blanks."""
    place = tmp_path / "with a blank" / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    assert made_at(place) == str(place)


@pytest.mark.parametrize("quote", ['"', "'"])
def test_an_environment_of_a_newer_python_knows_its_place(tmp_path: Path, quote: str) -> None:
    """The folder is also found in activate scripts of Python 3.12 on, with a line for Windows and other quotes."""
    (tmp_path / "bin").mkdir()
    lines = ['VIRTUAL_ENV=$(cygpath "/a b/.venv")', "else", f"    export VIRTUAL_ENV={quote}/a b/.venv{quote}"]
    (tmp_path / "bin" / "activate").write_text("\n".join(lines))
    assert made_at(tmp_path) == "/a b/.venv"


def test_half_installed_packages_are_seen_again(tmp_path: Path) -> None:
    """A package without RECORD, which pip writes last, no longer counts as installed."""
    (tmp_path / "torch-2.15.0.dist-info").mkdir()
    whole = tmp_path / "numpy-2.4.6.dist-info"
    whole.mkdir()
    (whole / "RECORD").touch()
    assert drop_half_installed(tmp_path) == ["torch"]
    assert [path.name for path in tmp_path.iterdir()] == ["numpy-2.4.6.dist-info"]
