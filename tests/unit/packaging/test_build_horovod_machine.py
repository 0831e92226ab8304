"""What the builder finds on a machine, and its errors where something is missing."""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from pathlib import Path

import pytest
from horovod_build import cuda, machine, mpi
from horovod_build.errors import BuildError

from tests.support.programs import Program, write_program


def test_named_compiler_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error quotes the value of CXX where it names no program."""
    monkeypatch.setenv("CXX", "no-such-g++")
    with pytest.raises(BuildError, match="no-such-g"):
        machine.find_compiler()


def test_old_compiler(program: Program) -> None:
    """The error about g++ 10 names the version to install."""
    program("g++", 'case "$1" in --version) echo "g++ (GCC) 10.2.1";; *) echo 10.2.1;; esac')
    with pytest.raises(BuildError, match=r"g\+\+ 10\.2\.1 is too old.*g\+\+-11"):
        machine.find_compiler()


def test_missing_python_headers(tmp_path: Path) -> None:
    """The error about missing headers names python3-dev and CPATH."""
    compiler = write_program(tmp_path, "g++", "exit 1")
    with pytest.raises(BuildError, match=r"apt install python3-dev.*CPATH"):
        machine.check_python_headers(machine.Compiler(str(compiler), "g++", "12"))


def torch_in(folder: Path, version: str, cuda: str | None, hip: str | None = None) -> None:
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    text = f"__version__ = {version!r}\ncuda = {cuda!r}\nhip = {hip!r}\n"
    (folder / "torch" / "version.py").write_text(text)


def find_torch_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> machine.Torch:
    real = importlib.util.spec_from_file_location("torch", folder / "torch" / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: real)
    return machine.find_torch()


def test_torch_is_read_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The builder reads torch's version file, since an import takes seconds."""
    torch_in(tmp_path, "2.13.0+cpu", None)
    found = find_torch_in(tmp_path, monkeypatch)
    assert (found.version, found.cuda, found.site) == ("2.13.0+cpu", None, tmp_path)


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error about a missing torch says what to type."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match=r"no torch.*pip install torch"):
        machine.find_torch()


@pytest.mark.parametrize(("version", "hip", "said"), [("2.5.1", None, "too old"), ("2.15.0", "6.2", "ROCm")])
def test_torch_that_cannot_be_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, hip: str | None, said: str
) -> None:
    """A torch that is too old and a torch for ROCm are refused."""
    torch_in(tmp_path, version, None, hip)
    with pytest.raises(BuildError, match=said):
        find_torch_in(tmp_path, monkeypatch)


def cuda_folder(folder: Path, release: str) -> Path:
    folder.mkdir()
    script = f'case "$1" in --version) echo "Cuda compilation tools, release {release}, V{release}.1";; '
    write_program(folder / "bin", "nvcc", script + "*) echo compute_80; echo compute_90;; esac")
    (folder / "include").mkdir()
    (folder / "include" / "nccl.h").write_text("#define NCCL_MAJOR 2\n#define NCCL_MINOR 30\n#define NCCL_PATCH 7\n")
    (folder / "lib").mkdir()
    (folder / "lib" / "libnccl.so.2").write_text("")
    return folder


def test_cuda_home_counts_where_its_major_version_is_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The toolkit that CUDA_HOME names is used if its major version is torch's, and else ignored."""
    right, wrong = cuda_folder(tmp_path / "right", "13.1"), cuda_folder(tmp_path / "wrong", "12.4")
    torch = machine.Torch("2.15.0", "13.2", tmp_path / "site")
    for name in (
        "HOROVOD_CUDA_HOME",
        "CUDA_PATH",
        "HOROVOD_BUILD_CUDA_CC_LIST",
        "HOROVOD_NCCL_HOME",
        "NCCL_HOME",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(right))
    found = cuda.find_cuda(torch)
    assert (found.home, found.version, found.archs, found.nccl_version) == (right, "13.1", (80, 90), "2.30.7")
    monkeypatch.setenv("CUDA_HOME", str(wrong))
    monkeypatch.setattr(cuda, "cuda_homes", lambda torch: [(wrong, False)])
    with pytest.raises(BuildError, match=r"no nvcc 13\.x \(but 12\.4 in .*cuda-toolkit\[nvcc,cccl\].*--without-cuda"):
        cuda.find_cuda(torch)


@pytest.mark.parametrize(
    ("here", "archs"), [("9.0", (80, 90)), ("8.9\n8.9", (80, 90)), ("11.0\n9.0", (80, 90, 110)), ("7.0", (80, 90))]
)
def test_the_gpus_of_this_machine_are_compiled_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: str, archs: tuple[int, ...]
) -> None:
    """Beside the usual ones, where no code for these runs on them; what this nvcc does not know it cannot make."""
    monkeypatch.delenv("HOROVOD_BUILD_CUDA_CC_LIST", raising=False)
    write_program(tmp_path / "bin", "nvcc", "echo compute_80; echo compute_90; echo compute_110")
    write_program(tmp_path / "driver", "nvidia-smi", f"printf '{here}\n'")
    monkeypatch.setenv("PATH", str(tmp_path / "driver"), prepend=os.pathsep)
    assert cuda.cuda_archs(tmp_path) == archs


def test_cuda_archs_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HOROVOD_BUILD_CUDA_CC_LIST chooses the architectures, and a value that is not a list of numbers is an error."""
    monkeypatch.setenv("HOROVOD_BUILD_CUDA_CC_LIST", "90, 80")
    assert cuda.cuda_archs(tmp_path) == (80, 90)
    monkeypatch.setenv("HOROVOD_BUILD_CUDA_CC_LIST", "sm_90")
    with pytest.raises(BuildError, match="sm_90"):
        cuda.cuda_archs(tmp_path)


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        ("mpirun (Open MPI) 4.1.8\n", ("Open MPI", "4.1.8")),
        ("mpirun (Open MPI) 5.0.11rc1\n", ("Open MPI", "5.0.11rc1")),
        ("HYDRA build details:\n    Version:                                 4.2.3\n", ("MPICH", "4.2.3")),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240\n", ("Intel MPI", "2021.13")),
    ],
)
def test_mpi_is_known_by_its_launcher(monkeypatch: pytest.MonkeyPatch, report: str, expected: tuple[str, str]) -> None:
    """Flavour and version of an MPI are those that its mpirun prints."""
    monkeypatch.setattr(mpi, "output_of", lambda *command: report)
    assert mpi.mpi_version(Path("/usr/bin/mpicxx"), None) == expected


def test_the_machines_own_mpi_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An mpicxx on the PATH is preferred to the environment's, since clusters tune theirs."""
    own, machine = tmp_path / "env" / "bin", tmp_path / "machine"
    own.mkdir(parents=True)
    write_program(own, "mpicxx", "true")
    write_program(machine, "mpicxx", "true")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(own))
    monkeypatch.setattr(mpi, "installed_version", lambda *names: "4.1.8")
    monkeypatch.setenv("PATH", f"{own}:{machine}")
    assert mpi.find_mpi().mpicxx == machine / "mpicxx"
    monkeypatch.setenv("PATH", str(own))
    assert mpi.find_mpi().prefix == own.parent
