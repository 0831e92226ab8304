"""The builder of Horovod, without a build and without network."""

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from horovod_build import machine
from horovod_build.machine import BuildError, Compiler, Cuda, Mpi, Torch
from horovod_build.patches import Patch, add_sources, apply_patch, load_patches
from horovod_build.plan import Plan

from tests.support.launching import write_program

BUILDER = Path(__file__).resolve().parents[3] / "packaging" / "build_horovod.py"


def test_missing_programs_are_one_line_each(tmp_path: Path) -> None:
    command = [sys.executable, str(BUILDER), "--dry-run"]
    environment = {**os.environ, "PATH": str(tmp_path), "CXX": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    for words in ("there is no C++ compiler", "apt install g++", "there is no make"):
        assert words in done.stderr
    assert done.stderr.count("\n") <= 4


def test_missing_build_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "installed_version", lambda name: None if name == "wheel" else "1")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    write_program(tmp_path, "make", "true")
    write_program(tmp_path, "cmake", "echo cmake version 4.0.1")
    with pytest.raises(BuildError, match=r"-m pip install wheel 'cmake>=3\.21,<4'$"):
        machine.check_tools()
    write_program(tmp_path, "cmake", "echo cmake version 3.31.6")
    assert machine.find_cmake() == tmp_path / "cmake"


def test_key_changes_with_every_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(
        Path("/cuda"), "13.2", (80, 90), "2.30.7", Path("/libnccl.so.2"), Path("/include"), True
    )
    patch = Patch("C1", "C1-y.patch", "fixes", "diff")
    mpi = Mpi("Open MPI 4.1.8", Path("/env/bin/mpicxx"), Path("/env"))
    torch = Torch("2.15.0+cu132", "13.2", tmp_path)
    compiler = Compiler("g++", "g++ 12.2.0")
    plan = Plan((patch,), {"horovod/new.cc": "int x;\n"}, torch, compiler, mpi, cuda)
    changes = [
        {"patches": (replace(patch, text="another diff"),)},
        {"sources": {"horovod/new.cc": "int y;\n"}},
        {"torch": replace(torch, version="2.15.1")},
        {"compiler": replace(compiler, name="g++ 13.1.0")},
        {"mpi": replace(mpi, name="Open MPI 5.0.11")},
        {"mpi": Mpi("Open MPI 4.1.8", Path("/opt/a/bin/mpicxx"), None)},
        {"mpi": Mpi("Open MPI 4.1.8", Path("/opt/b/bin/mpicxx"), None)},
        {"cuda": replace(cuda, archs=(90,))},
        {"cuda": replace(cuda, nccl_version="2.27.0")},
    ]
    keys = {plan.key, *(replace(plan, **change).key for change in changes)}
    moved = {"torch": replace(torch, site=Path("/other")), "mpi": replace(mpi, prefix=Path("/b"))}
    assert replace(plan, **moved).key == plan.key
    monkeypatch.setenv("CXXFLAGS", "-march=native")
    assert len(keys | {plan.key}) == len(changes) + 2
    # pip strips leading zeros off a label that is a number
    assert re.fullmatch(r"0\.28\.1\+hvdtrain\.k[0-9a-f]{12}", plan.version)


@pytest.mark.parametrize(
    ("version", "hip", "error"),
    [
        ("2.13.0+cpu", None, ""),
        ("2.5.1", None, "too old"),
        ("2.15.0", "6.2", "ROCm"),
        ("", None, "pip install torch"),
    ],
)
def test_torch_is_read_and_not_imported(
    version: str, hip: str | None, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    (folder / "version.py").write_text(f"__version__ = {version!r}\ncuda = None\nhip = {hip!r}\n")
    found = importlib.util.spec_from_file_location("torch", folder / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found if version else None)
    with pytest.raises(BuildError, match=error) if error else nullcontext():
        assert machine.find_torch() == Torch(version, None, tmp_path)


def test_cuda_home_counts_if_its_major_version_is_torchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = tmp_path / "right"
    for folder, release in (("right", "13.1"), ("wrong", "12.4")):
        says = f'echo "Cuda compilation tools, release {release}, V{release}.1"'
        body = f'case "$1" in --version) {says};; *) echo compute_80; echo compute_90;; esac'
        write_program(tmp_path / folder / "bin", "nvcc", body)
    for file, text in {
        "include/nccl.h": "#define NCCL_MAJOR 2\n#define NCCL_MINOR 30\n#define NCCL_PATCH 7\n",
        "lib/libnccl.so.2": "",
    }.items():
        (right / file).parent.mkdir()
        (right / file).write_text(text)
    other = "HOROVOD_CUDA_HOME CUDA_PATH HOROVOD_BUILD_CUDA_CC_LIST HOROVOD_NCCL_HOME NCCL_HOME"
    for name in other.split():
        monkeypatch.delenv(name, raising=False)
    torch = Torch("2.15.0", "13.2", tmp_path / "site")
    monkeypatch.setenv("CUDA_HOME", str(right))
    found = machine.find_cuda(torch)
    expected = (right, "13.1", (80, 90), "2.30.7")
    assert (found.home, found.version, found.archs, found.nccl_version) == expected
    monkeypatch.setenv("HOROVOD_BUILD_CUDA_CC_LIST", "90")
    assert machine.find_cuda(torch).archs == (90,)
    monkeypatch.setattr(machine, "cuda_homes", lambda torch: [(tmp_path / "wrong", False)])
    says = r"no nvcc 13\.x \(but 12\.4 in .*cuda-toolkit\[nvcc,cccl\].*--without-cuda"
    with pytest.raises(BuildError, match=says):
        machine.find_cuda(torch)


def test_the_mpi_of_the_machine_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clusters tune their MPI."""
    own = write_program(tmp_path / "env" / "bin", "mpicxx", "true").parent
    other = write_program(tmp_path / "machine", "mpicxx", "true")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(own))
    monkeypatch.setattr(machine, "installed_version", lambda *names: "4.1.8")
    monkeypatch.setenv("PATH", f"{own}:{other.parent}")
    assert machine.find_mpi().mpicxx == other
    monkeypatch.setenv("PATH", str(own))
    assert machine.find_mpi().prefix == own.parent


DIFF = "--- a/one.txt\n+++ b/one.txt\n@@ -1,3 +1,3 @@\n first\n-second\n+2nd\n third\n"
FITS = "first\nsecond\nthird\n"


def test_a_patch_changes_files() -> None:
    Path("patches").mkdir()
    Path("patches/C1-test.patch").write_text(f"Why: for the test.\n{DIFF}")
    Path("one.txt").write_text(f"zero\n{FITS}")
    (patch,) = load_patches(Path("patches"))
    apply_patch(patch, Path())
    assert Path("one.txt").read_text() == "zero\nfirst\n2nd\nthird\n"


@pytest.mark.parametrize(
    ("diff", "content", "error"),
    [
        (DIFF, "nothing of it\n", r"T1\.patch does not fit.*one\.txt.*nowhere"),
        (DIFF, FITS * 2, r"T1\.patch does not fit.*one\.txt.*in 2 places"),
        (
            "--- /dev/null\n+++ b/new.txt\n@@ -0,0 +1 @@\n+made\n",
            FITS,
            r"T1\.patch makes new\.txt: put new files",
        ),
    ],
    ids=["nowhere", "two places", "makes a file"],
)
def test_a_patch_that_does_not_fit_stops_the_build(diff: str, content: str, error: str) -> None:
    Path("one.txt").write_text(content)
    with pytest.raises(BuildError, match=error):
        apply_patch(Patch("T1", "T1.patch", "for the test", diff), Path())


def test_a_new_file_replaces_none_of_the_release() -> None:
    add_sources({"folder/new.txt": "made\n"}, Path())
    assert Path("folder/new.txt").read_text() == "made\n"
    with pytest.raises(FileExistsError):
        add_sources({"folder/new.txt": "ours\n"}, Path())
