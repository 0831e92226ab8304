"""Builds the libraries of the stand-in with the headers that Horovod was built with, and keeps them by digest."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SOURCES = Path(__file__).parent / "source"
CACHE = Path(__file__).parents[2] / "build" / "fake_gpu"
OPTIONS = ["-std=c++17", "-O1", "-g", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
LIBRARY = "libfake_gpu.so"
# Horovod and torch open these by name for the calls of the driver.
DRIVERS = ("libcuda.so", "libcuda.so.1")


class NotHere(Exception):
    """This machine or this environment has no use for the stand-in; the text says why."""


def built() -> Path:
    """Return the folder of the libraries, built now if sources, headers or compiler have changed.

    Raises NotHere if torch has no CUDA, Horovod no NCCL, or the headers or g++ are missing.
    """
    includes = headers()
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise NotHere("the stand-in for a GPU is built with g++: apt install g++")
    folder = CACHE / digest(compiler, includes)
    if not (folder / LIBRARY).exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as part:
            _build(compiler, includes, Path(part))
            with suppress(OSError):  # another process was faster; the two are equal
                Path(part).rename(folder)
                Path(part).mkdir()
    return folder


def headers() -> list[Path]:
    """Return the folders of headers of CUDA and NCCL. Raises NotHere as `built` does."""
    import horovod.torch as hvd
    import torch
    from horovod_build import cuda
    from horovod_build.errors import BuildError
    from horovod_build.machine import Torch

    if torch.version.cuda is None:
        raise NotHere(f"torch {torch.__version__} is built without CUDA")
    if not hvd.nccl_built():
        raise NotHere("Horovod is built without NCCL")
    site = Path(torch.__file__).parents[1]
    here = Torch(torch.__version__, torch.version.cuda, site)
    homes = [home for home, _ in cuda.cuda_homes(here) if (home / "include" / "cuda_runtime_api.h").exists()]
    if not homes:
        raise NotHere("there are no headers of the CUDA runtime")
    try:
        _, _, nccl = cuda.find_nccl(here, homes[0])
    except BuildError as error:
        raise NotHere(str(error)) from None
    return [homes[0] / "include", nccl]


def digest(compiler: str, includes: Iterable[Path]) -> str:
    """Return what stands for everything that the libraries are made of and with."""
    made_of = hashlib.sha256()
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    made_of.update(repr((version, OPTIONS, DRIVERS)).encode())
    names = [path / name for path in includes for name in ("cuda_runtime_api.h", "driver_types.h", "nccl.h")]
    for path in (*sorted(SOURCES.iterdir()), Path(__file__), *filter(Path.exists, names)):
        made_of.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return made_of.hexdigest()[:16]


def _build(compiler: str, includes: Iterable[Path], folder: Path) -> None:
    options = [*OPTIONS, *(f"-isystem{path}" for path in includes), "-shared", "-pthread"]
    sources, library = map(str, sorted(SOURCES.glob("*.cc"))), str(folder / LIBRARY)
    _run([compiler, *options, f"-Wl,-soname,{LIBRARY}", *sources, "-o", library, "-ldl", "-lrt"])
    for name in DRIVERS:
        # Empty: what is looked for in it is found in the library that it depends on.
        rpath = ["-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN"]
        _run([compiler, "-shared", "-pthread", f"-Wl,-soname,{name}", *rpath, library, "-o", str(folder / name)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
