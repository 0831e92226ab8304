"""What is on this machine: torch, the compiler and the other tools that every build needs."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
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

from horovod_build.errors import BuildError

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 6)
OLDEST_GCC = 11  # torch's headers are C++20, and g++ 10 has no <bit> functions that they use


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
    """Return the compiler flags for the vector units that Horovod's fp16 sums use and this processor has."""
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
    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def find_compiler() -> Compiler:
    """Return the compiler: CXX, g++ or c++. Raises BuildError if there is none or it is too old for C++20."""
    named = os.environ.get("CXX")
    command = next((c for c in ([named] if named else ["g++", "c++"]) if shutil.which(shlex.split(c)[0])), None)
    if command is None:
        what = f"CXX names {named!r}, which is not there" if named else "there is no C++ compiler"
        raise BuildError(f"{what}: Horovod is compiled here; apt install g++ (or your system's gcc-c++), 11 or newer")
    words = shlex.split(command)
    name = "clang" if "clang" in output_of(*words, "--version") else "g++"
    version = output_of(*words, "-dumpfullversion", "-dumpversion").strip()
    if name == "g++" and version_tuple(version) < (OLDEST_GCC,):
        raise BuildError(
            f"g++ {version} is too old: torch's headers are C++20, which takes g++ {OLDEST_GCC} or newer; "
            f"apt install g++-{OLDEST_GCC} and set CXX=g++-{OLDEST_GCC}"
        )
    return Compiler(command, name, version)


def check_pip() -> None:
    """Check that there is pip, which fetches and installs. Raises BuildError."""
    if importlib.util.find_spec("pip") is None:
        raise BuildError(
            "this environment has no pip, which fetches and installs; "
            f"{shlex.quote(sys.executable)} -m ensurepip (or: uv pip install pip)"
        )


def check_make() -> None:
    """Check that there is make, since CMake writes makefiles. Raises BuildError."""
    if not shutil.which("make"):
        raise BuildError("there is no make: Horovod's build runs it; apt install make")


def check_build_tools() -> None:
    """Check that the environment has the Python packages of the build. Raises BuildError."""
    lacks = [name for name in ("setuptools", "wheel", "packaging") if installed_version(name) is None]
    if find_cmake() is None:
        lacks.append("'cmake>=3.21,<4'")  # 4 refuses the Gloo that Horovod bundles
    if lacks:
        raise BuildError(f"build tools are missing: {shlex.quote(sys.executable)} -m pip install {' '.join(lacks)}")


def find_cmake() -> Path | None:
    """Return a CMake that reads CMAKE_TOOLCHAIN_FILE and still accepts the bundled Gloo; None if there is none."""
    own = os.pathsep.join([sysconfig.get_path("scripts"), *os.get_exec_path()])
    found = shutil.which("cmake", path=own)
    version = re.search(r"cmake version (\S+)", output_of(found, "--version")) if found else None
    return Path(found) if found and version and (3, 21) <= version_tuple(version[1]) < (4,) else None


def check_python_headers(compiler: Compiler) -> None:
    """Check that the compiler finds Python.h, in CPATH too.

    Raises BuildError if it does not, or if this Python is too old.
    """
    if sys.version_info[:2] < OLDEST_PYTHON:
        raise BuildError(f"Python {platform.python_version()} is too old: 3.10 is the oldest supported")
    command = [*shlex.split(compiler.command), "-I", sysconfig.get_path("include"), "-x", "c++", "-E", "-"]
    result = subprocess.run(command, input="#include <Python.h>\n", capture_output=True, text=True, check=False)
    if result.returncode != 0:
        version = sysconfig.get_python_version()
        raise BuildError(
            f"Python.h of Python {version} is missing: Horovod is an extension module; "
            "apt install python3-dev (or your system's python3-devel), or name a folder that has it in CPATH"
        )
