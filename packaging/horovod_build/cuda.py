"""The CUDA compiler that fits torch, and the NCCL of torch."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from horovod_build.errors import BuildError
from horovod_build.machine import Torch, output_of

CUDA_ARCHS = (70, 75, 80, 86, 89, 90, 100, 120)  # V100, T4, A100, A10, L4 and 40x0, H100, B200, 50x0


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
    """Return a CUDA compiler of torch's major version, with torch's NCCL. Raises BuildError if either is missing."""
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
        + f": Horovod's GPU kernels need one; {install}, or add --without-cuda for a Horovod that trains on CPUs only"
    )


def cuda_homes(torch: Torch) -> list[tuple[Path, bool]]:
    """Return folders that may hold a CUDA compiler, best first, each with whether a wheel brought it."""
    named = [os.environ[name] for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    homes = [(Path(name), False) for name in named]
    homes += [(path, True) for path in sorted((torch.site / "nvidia").glob("cu[0-9][0-9]"))]
    homes += [(path, False) for path in sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    homes.append((Path("/usr/local/cuda"), False))
    if nvcc := shutil.which("nvcc"):
        homes.append((Path(nvcc).resolve().parent.parent, False))
    return homes


def nvcc_version(home: Path) -> str | None:
    """Return the release, such as 13.0, of the nvcc in a CUDA folder; None if there is none that runs."""
    match = re.search(r"release (\d+\.\d+)", output_of(home / "bin" / "nvcc", "--version"))
    return match.group(1) if match else None


def find_nccl(torch: Torch, cuda_home: Path) -> tuple[str, Path, Path]:
    """Return version, library and headers of NCCL, from HOROVOD_NCCL_HOME or torch.

    Raises BuildError if there is none.
    """
    roots = [Path(os.environ[name]) for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME") if os.environ.get(name)]
    for root in [*roots, torch.site / "nvidia" / "nccl", cuda_home, Path("/usr")]:
        header = root / "include" / "nccl.h"
        libraries = [
            path
            for pattern in ("lib/libnccl.so*", "lib64/libnccl.so*", "lib/*/libnccl.so*")
            for path in sorted(root.glob(pattern))
        ]
        if header.exists() and libraries:
            text = header.read_text(encoding="utf-8", errors="replace")
            numbers = [re.search(rf"#define NCCL_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
            return ".".join(n.group(1) for n in numbers if n), libraries[0], header.parent
    raise BuildError(
        "torch has CUDA, but not its NCCL (nvidia/nccl beside torch): "
        "set HOROVOD_NCCL_HOME to a folder with include/nccl.h and lib/libnccl.so"
    )


def cuda_archs(home: Path) -> tuple[int, ...]:
    """Return the compute capabilities to compile for, such as 80 for 8.0.

    HOROVOD_BUILD_CUDA_CC_LIST names them; the default is each of CUDA_ARCHS that this nvcc knows. Raises BuildError if
    the variable is not a list of numbers.
    """
    named = os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST")
    if named:
        if not re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", named):
            raise BuildError(f"HOROVOD_BUILD_CUDA_CC_LIST={named!r} is not a list of numbers such as 80,90")
        return tuple(sorted({int(number) for number in named.split(",")}))
    known = {
        int(number) for number in re.findall(r"compute_(\d+)", output_of(home / "bin" / "nvcc", "--list-gpu-arch"))
    }
    return tuple(arch for arch in CUDA_ARCHS if not known or arch in known)
