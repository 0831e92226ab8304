"""Set the environment variables that Horovod's CMake files and ours read."""

from __future__ import annotations

import os
import re
from pathlib import Path

from horovod_build.errors import BuildError
from horovod_build.machine import cpu_flags, find_cmake, output_of
from horovod_build.mpi import Mpi
from horovod_build.plan import CMAKE_FILES, Plan
from horovod_build.workshop import Workshop


def build_environment(plan: Plan, shop: Workshop, jobs: int) -> dict[str, str]:
    """Return the environment variables of the build. Raises BuildError if the environment's MPI is damaged."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    for path in CMAKE_FILES:
        shop.copy_of(path)
    rpath = ["$ORIGIN/../../torch/lib", "$ORIGIN/../../../.."]  # torch; the environment's lib folder (MPI wheels)
    env |= {
        "CMAKE_TOOLCHAIN_FILE": str(shop.folder / CMAKE_FILES[0].name),
        "CXX": plan.compiler.command,
        "MAKEFLAGS": f"-j{jobs}",
        "HOROVOD_LOCAL_VERSION": plan.version.partition("+")[2],
        "HOROVOD_CMAKE": str(shop.path(find_cmake() or Path("cmake"))),
        "HOROVOD_BUILD_ARCH_FLAGS": cpu_flags() or " ",
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
    }
    env |= mpi_environment(plan.mpi, shop, rpath)
    env |= cuda_environment(plan, shop, env["PATH"], rpath)
    env["HVD_BUILD_RPATH"] = ":".join(rpath)
    return env


def mpi_environment(mpi: Mpi | None, shop: Workshop, rpath: list[str]) -> dict[str, str]:
    """Return the variables that name the MPI to link; add folders for the loader to `rpath`.

    Raises BuildError if the environment's MPI is damaged.
    """
    if mpi is None:
        return {"HOROVOD_WITHOUT_MPI": "1"}
    if mpi.prefix is None:
        rpath += machine_library_folders(mpi.mpicxx)
        return {"HOROVOD_WITH_MPI": "1", "HVD_BUILD_MPICXX": str(mpi.mpicxx)}
    libraries = sorted(shop.path(mpi.prefix).glob("lib/libmpi.so*"))
    header = shop.path(mpi.prefix) / "include" / "mpi.h"
    if not libraries or not header.exists():
        raise BuildError(
            f"{mpi} is damaged: there is no lib/libmpi.so or include/mpi.h in {mpi.prefix}; "
            "install it again, or use --without-mpi"
        )
    return {
        "HOROVOD_WITH_MPI": "1",
        "HVD_BUILD_MPI_LIBRARY": str(libraries[0]),
        "HVD_BUILD_MPI_INCLUDE": str(header.parent),
    }


def machine_library_folders(mpicxx: Path) -> list[str]:
    """Return the folders of the machine's MPI that the loader does not search by itself."""
    folders = re.findall(r"-L(\S+)", output_of(mpicxx, "-show"))
    return [folder for folder in dict.fromkeys(folders) if not folder.startswith(("/usr/lib", "/lib"))]


def cuda_environment(plan: Plan, shop: Workshop, path: str, rpath: list[str]) -> dict[str, str]:
    """Return the variables that name the CUDA compiler and NCCL for Horovod, torch and our CMake file.

    Folders for the loader are added to `rpath`.
    """
    cuda = plan.cuda
    if cuda is None:
        return {"HOROVOD_WITHOUT_NVTX": "1"}
    home = shop.path(cuda.home)
    rpath += [
        f"$ORIGIN/../../nvidia/{part}/lib" for part in ("nccl", f"cu{cuda.version.split('.')[0]}", "cuda_runtime")
    ]
    env = {
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_NCCL_LINK": "SHARED",
        "HOROVOD_BUILD_CUDA_CC_LIST": ",".join(str(arch) for arch in cuda.archs),
        "HOROVOD_CUDA_HOME": str(home),  # Horovod's CMake files and build_utils.py
        "CUDA_HOME": str(home),  # torch.utils.cpp_extension
        "PATH": f"{home / 'bin'}{os.pathsep}{path}",  # build_utils.py tries plain nvcc first
        "HVD_BUILD_NCCL_LIBRARY": str(shop.path(cuda.nccl_library)),
        "HVD_BUILD_NCCL_INCLUDE": str(shop.path(cuda.nccl_include)),
    }
    # The two small kernels can also be compiled by a host compiler that is too new for nvcc.
    flags = [os.environ.get("NVCC_APPEND_FLAGS", ""), "-allow-unsupported-compiler"]
    if cuda.from_index:
        flags.append(f"-L{home / 'lib'}")  # the nvcc 13.0 of the package index looks in lib64, which it does not have
        if cudart := sorted((home / "lib").glob("libcudart.so.*")):
            env["HVD_BUILD_CUDART"] = str(cudart[0])
    env["NVCC_APPEND_FLAGS"] = " ".join(flags).strip()
    return env
