"""The builder of Horovod, without a compiler run and without the network."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from horovod_build import show
from horovod_build.cuda import Cuda
from horovod_build.errors import BuildError
from horovod_build.machine import Compiler, Torch
from horovod_build.mpi import Mpi
from horovod_build.patches import SOURCE_DIR, Patch, Source, load_patches
from horovod_build.plan import Plan, make_plan
from horovod_build.wheel import build_record

BUILDER = Path(__file__).resolve().parents[3] / "packaging" / "build_horovod.py"


def fail(*arguments: str, **env: str) -> str:
    """Run the builder where it must fail, and return its stderr."""
    result = subprocess.run(
        [sys.executable, str(BUILDER), *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


def test_missing_compiler_is_one_line(tmp_path: Path) -> None:
    """A machine without compiler and make gets a line for each at once, before anything is fetched."""
    said = fail("--dry-run", PATH=str(tmp_path), CXX="")
    assert "there is no C++ compiler" in said
    assert "apt install g++" in said
    assert "there is no make" in said
    assert len(said.splitlines()) <= 4


def test_a_copy_of_the_folder_works_alone(tmp_path: Path) -> None:
    """The builder finds its parts in its own folder from any other one, even with -P or PYTHONSAFEPATH."""
    copy = tmp_path / "a copy"
    shutil.copytree(BUILDER.parent, copy)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(copy / BUILDER.name), "--list-patches"]
    for more in ({}, {"PYTHONSAFEPATH": "1"}):
        said = subprocess.run(command, cwd="/", env={**env, **more}, capture_output=True, text=True, check=True).stdout
        assert len(said.splitlines()) == len(list((copy / "patches").glob("*.patch")))


def test_all_problems_are_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three things that are missing are three lines of one run."""

    def refuse(text: str) -> object:
        def look(*_: object) -> None:
            raise BuildError(text)

        return look

    monkeypatch.setattr("horovod_build.plan.find_compiler", refuse("one"))
    monkeypatch.setattr("horovod_build.plan.check_make", refuse("two"))
    monkeypatch.setattr("horovod_build.plan.find_torch", refuse("three"))
    with pytest.raises(BuildError) as caught:
        make_plan()
    assert caught.value.args == ("one", "two", "three")


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    torch = Torch("2.15.0+cu132", "13.2", tmp_path)
    mpi = Mpi("Open MPI", "4.1.8", Path("/env/bin/mpicxx"), Path("/env"))
    cuda = Cuda(Path("/cuda"), "13.2", (80, 90), "2.30.7", Path("/libnccl.so.2"), Path("/include"), True)
    compiler = Compiler("g++", "g++", "12.2.0")
    added = (Source("horovod/new.cc", "int x;\n"),)
    patches = (Patch("B1", "B1-x.patch", "compiles", "diff"), Patch("C1", "C1-y.patch", "mends", "diff", added))
    return Plan("0.28.1", "0" * 64, patches, torch, compiler, mpi, cuda)


def test_key_changes_with_every_input(plan: Plan) -> None:
    """Everything that the wheel depends on is part of its key."""
    changes = [
        {"horovod": "0.29.0"},
        {"sha256": "1" * 64},
        {"patches": plan.patches[:1]},
        {"patches": (plan.patches[0], replace(plan.patches[1], text="another diff"))},
        {"patches": (plan.patches[0], replace(plan.patches[1], adds=()))},
        {"patches": (plan.patches[0], replace(plan.patches[1], adds=(Source("horovod/new.cc", "int y;\n"),)))},
        {"patches": (plan.patches[0], replace(plan.patches[1], adds=(Source("horovod/other.cc", "int x;\n"),)))},
        {"torch": replace(plan.torch, version="2.15.1")},
        {"torch": replace(plan.torch, cuda="12.8")},
        {"compiler": replace(plan.compiler, version="13.1.0")},
        {"mpi": None},
        {"mpi": replace(plan.mpi, version="5.0.11")},
        {"mpi": replace(plan.mpi, flavour="MPICH")},
        {"mpi": replace(plan.mpi, prefix=None)},
        {"cuda": None},
        {"cuda": replace(plan.cuda, archs=(90,))},
        {"cuda": replace(plan.cuda, version="13.0")},
        {"cuda": replace(plan.cuda, nccl_version="2.27.0")},
    ]
    keys = {replace(plan, **change).key for change in changes}
    assert len(keys | {plan.key}) == len(changes) + 1


def test_key_changes_with_every_new_file(plan: Plan, tmp_path: Path) -> None:
    """A change of any file in horovod_sources/ leads to another wheel."""
    added = [source.path for patch in load_patches() for source in patch.adds]
    keys = {replace(plan, patches=tuple(load_patches())).key}
    for name in added:
        folder = tmp_path / name.replace("/", "-")
        shutil.copytree(SOURCE_DIR, folder)
        with (folder / name).open("a") as file:
            file.write("\n")
        keys.add(replace(plan, patches=tuple(load_patches(source_folder=folder))).key)
    assert len(keys) == len(added) + 1 > 1


def test_key_does_not_depend_on_where_the_environment_is(plan: Plan, tmp_path: Path) -> None:
    """A second clone of the project finds the wheel of the first."""
    moved = replace(plan, torch=replace(plan.torch, site=tmp_path / "other"), mpi=replace(plan.mpi, prefix=Path("/b")))
    assert moved.key == plan.key


def test_key_names_the_place_of_the_machines_own_mpi(plan: Plan) -> None:
    """Two MPIs of one version in two folders have different keys, since they may be built differently."""
    one = replace(plan, mpi=replace(plan.mpi, prefix=None, mpicxx=Path("/opt/a/bin/mpicxx")))
    two = replace(plan, mpi=replace(plan.mpi, prefix=None, mpicxx=Path("/opt/b/bin/mpicxx")))
    assert one.key != two.key


def test_flags_of_the_compiler_are_part_of_the_key(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """CXXFLAGS reach the compiler, so they are part of the key."""
    before = plan.key
    monkeypatch.setenv("CXXFLAGS", "-march=native")
    assert plan.key != before


def test_version_label_is_one_that_pip_takes(plan: Plan) -> None:
    """The local version label starts with a letter, since pip would strip leading zeros off a number."""
    assert re.fullmatch(r"0\.28\.1\+hvdtrain\.k[0-9a-f]{12}", plan.version)


def test_record_says_what_the_wheel_is(plan: Plan) -> None:
    """The record in the wheel has the fields that `hvd-train doctor` reads."""
    record = json.loads(json.dumps(build_record(plan)))
    assert record["mpi"] == "Open MPI 4.1.8 (package index)"
    assert [patch["name"] for patch in record["patches"]] == ["B1", "C1"]
    assert [patch["adds"] for patch in record["patches"]] == [[], ["horovod/new.cc"]]
    assert {"horovod", "torch", "torch_cuda", "python", "nccl", "compiler", "cuda_archs", "built"} <= set(record)


def test_log_is_boiled_down_to_its_errors(tmp_path: Path) -> None:
    """An error quotes the compiler, not what pip says about its failure."""
    log = tmp_path / "log"
    log.write_text("make\nx.cc:1:2: error: no such thing\nERROR: Failed building wheel for horovod\nnote: more\n")
    assert show.first_errors(log) == ["x.cc:1:2: error: no such thing"]


def test_progress_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal, lines with the percentage are printed at intervals of time, not for each file."""
    monkeypatch.setattr(show, "PROGRESS_EVERY_S", 0.01)
    stream = io.StringIO()
    with show.Progress(stream) as progress:
        progress.feed("[  3%] Building CXX object x.o")
        progress.feed("[ 40%] Building CXX object y.o")
        progress.feed("a line without a number")
        deadline = time.monotonic() + 5
        while "40%" not in stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "horovod: compiling 40% (0 s)\n" in stream.getvalue()
    assert "\r" not in stream.getvalue()
