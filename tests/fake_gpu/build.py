"""Builds the libraries of the stand-in with the headers that Horovod was built with,
and keeps them by digest.
"""

import hashlib
import re
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

SOURCES = Path(__file__).parent / "source"
CACHE = Path(__file__).parents[2] / "build" / "fake_gpu"
OPTIONS = [
    "-std=c++17",
    "-O1",
    "-g",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-pthread",
]
LIBRARY = "libfake_gpu.so"
# Horovod and torch open these by name for the calls of the driver.
DRIVERS = ("libcuda.so", "libcuda.so.1")
# Without these the real libraries would answer, which know nothing of the stand-in's streams.
ABSENT = """\
namespace fake { void report(const char *, ...); }
#define ABSENT(call) \\
    extern "C" __attribute__((visibility("default"))) int call() { fake::report("there is no " #call); return 801; }
"""  # noqa: E501


class NotHere(Exception):
    """This machine or this environment has no use for the stand-in; the text says why."""


def built() -> Path:
    """Return the folder of the libraries, built now if they are not there.

    Raises NotHere if torch has no CUDA, Horovod no NCCL, or the headers or g++ are missing.
    """
    includes, users = headers_and_users()
    if shutil.which("g++") is None:
        raise NotHere("the stand-in for a GPU is built with g++: apt install g++")
    sources = [path.read_text() for path in sorted(SOURCES.iterdir())]
    names = ABSENT + "".join(
        f"ABSENT({call})\n" for call in sorted(_called(users) - _defined(sources))
    )
    made_of = repr((sources, Path(__file__).read_text(), names, includes))
    folder = CACHE / hashlib.sha256(made_of.encode()).hexdigest()[:16]
    if not (folder / LIBRARY).exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as part:
            _build(includes, names, Path(part))
            with suppress(OSError):  # another process was faster; the two are equal
                Path(part).rename(folder)
                Path(part).mkdir()
    return folder


def headers_and_users() -> tuple[list[Path], list[Path]]:
    """Return the folders of headers of CUDA and NCCL, and the libraries that call these.

    Raises NotHere.
    """
    import horovod.torch as hvd
    import torch
    from horovod_build.machine import BuildError, Torch, cuda_homes, find_nccl

    if torch.version.cuda is None:
        raise NotHere(f"torch {torch.__version__} is built without CUDA")
    if not hvd.nccl_built():
        raise NotHere("Horovod is built without NCCL")
    here = Torch(torch.__version__, torch.version.cuda, Path(torch.__file__).parents[1])
    homes = [
        home for home, _ in cuda_homes(here) if (home / "include" / "cuda_runtime_api.h").exists()
    ]
    if not homes:
        raise NotHere("there are no headers of the CUDA runtime")
    try:
        _, _, nccl = find_nccl(here, homes[0])
    except BuildError as error:
        raise NotHere(str(error)) from None
    users = [
        *(Path(torch.__file__).parent / "lib").glob("lib*.so"),
        *Path(hvd.__file__).parent.glob("mpi_lib*.so"),
    ]
    return [homes[0] / "include", nccl], users


def _called(libraries: list[Path]) -> set[str]:
    symbols = _run(["nm", "-D", "--undefined-only", *map(str, libraries)])
    return set(re.findall(r" U ((?:cuda|nccl|cupti)[A-Z]\w+)", symbols))


def _defined(sources: list[str]) -> set[str]:
    return set(re.findall(r"^API .*?(\w+)\(", "\n".join(sources), re.MULTILINE))


def _build(includes: list[Path], absent: str, folder: Path) -> None:
    (folder / "absent.cc").write_text(absent)
    options = [*OPTIONS, *(f"-isystem{path}" for path in includes), "-shared"]
    sources = map(str, (*SOURCES.glob("*.cc"), folder / "absent.cc"))
    library = str(folder / LIBRARY)
    _run(["g++", *options, f"-Wl,-soname,{LIBRARY}", *sources, "-o", library, "-ldl", "-lrt"])
    for name in DRIVERS:
        # Empty: what is looked for in it is found in the library that it depends on.
        rpath = ["-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN"]
        _run(["g++", "-shared", f"-Wl,-soname,{name}", *rpath, library, "-o", str(folder / name)])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout
