"""Find everything that a build depends on before anything is fetched,
and name its wheel by a key.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod_build.cache import build_folder
from horovod_build.machine import (
    BuildError,
    Compiler,
    Cuda,
    Mpi,
    Torch,
    check_python_headers,
    check_tools,
    cpu_flags,
    find_compiler,
    find_cuda,
    find_mpi,
    find_torch,
)
from horovod_build.patches import Patch, load_patches, load_sources

RELEASE, SHA256 = "0.28.1", "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
# part of the cache key: raise it when this package builds differently from the same inputs
RECIPE = 1
FOLDER = Path(__file__).resolve().parents[1]
CMAKE_FILES = (FOLDER / "horovod-toolchain.cmake", FOLDER / "horovod-project.cmake")


@dataclass(frozen=True)
class Plan:
    """Everything that a build depends on."""

    patches: tuple[Patch, ...]
    sources: dict[str, str]
    torch: Torch
    compiler: Compiler
    mpi: Mpi | None
    cuda: Cuda | None

    def inputs(self) -> dict[str, Any]:
        """Return everything that changes the wheel, by name."""
        return {
            "recipe": RECIPE,
            "horovod": f"{RELEASE} {SHA256}",
            "patches": digest("".join(f"{p.file}\n{p.why}\n{p.text}" for p in self.patches)),
            "sources": digest("".join(f"{path}\n{text}" for path, text in self.sources.items())),
            "cmake": digest("".join(path.read_text(encoding="utf-8") for path in CMAKE_FILES)),
            "python": sysconfig.get_config_var("SOABI"),
            "machine": platform.machine(),
            "glibc": platform.libc_ver()[1],
            "cpu_flags": cpu_flags(),
            "torch": self.torch.version,
            "torch_cuda": self.torch.cuda,
            "compiler": self.compiler.name,
            "flags": {
                name: os.environ.get(name, "") for name in ("CPPFLAGS", "CXXFLAGS", "LDFLAGS")
            },
            "mpi": str(self.mpi) if self.mpi else None,
            "nvcc": self.cuda.version if self.cuda else None,
            "nccl": self.cuda.nccl_version if self.cuda else None,
            "cuda_archs": list(self.cuda.archs) if self.cuda else None,
        }

    @property
    def key(self) -> str:
        """The name of the wheel in the cache."""
        return digest(json.dumps(self.inputs(), sort_keys=True))[:16]

    @property
    def version(self) -> str:
        """The version of the release with the key as its local label, by
        which pip tells builds apart.
        """
        return f"{RELEASE}+hvdtrain.k{self.key[:12]}"


def digest(text: str) -> str:
    """Return the SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def make_plan(
    without_patches: bool = False, without_mpi: bool = False, without_cuda: bool = False
) -> Plan:
    """Look at the machine and return what to build.

    Raises BuildError with all problems that can be found without compiling, a line for each.
    """
    problems: list[str] = []

    def attempt(look: Callable[[], Any]) -> Any:
        try:
            return look()
        except BuildError as error:
            problems.extend(error.args)
            return None

    if sys.platform != "linux":
        raise BuildError("this builder works on Linux only")
    compiler = attempt(find_compiler)
    attempt(check_tools)
    if compiler:
        attempt(lambda: check_python_headers(compiler))
    torch = attempt(find_torch)
    cuda = attempt(lambda: find_cuda(torch)) if torch and torch.cuda and not without_cuda else None
    attempt(build_folder)
    patches = attempt(load_patches) or []
    if problems:
        raise BuildError(*problems)
    chosen = tuple(patch for patch in patches if patch.name.startswith("B") or not without_patches)
    mpi = None if without_mpi else find_mpi()
    sources = {} if without_patches else load_sources()
    return Plan(chosen, sources, torch, compiler, mpi, cuda)
