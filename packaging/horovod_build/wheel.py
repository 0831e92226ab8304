"""Get the wheel of a plan: from the cache, or fetched, patched and
compiled in a temporary folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from horovod_build.cache import build_folder, cache_folder, cached_wheel, file_digest, publish, say
from horovod_build.machine import BuildError, Mpi, cpu_flags, find_cmake, output_of
from horovod_build.patches import add_sources, apply_patch
from horovod_build.plan import CMAKE_FILES, RELEASE, SHA256, Plan


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Print what the block did and how long it took, unless it raises."""
    start = time.monotonic()
    yield
    say(f"{what} ({time.monotonic() - start:.1f} s)")


def obtain_wheel(plan: Plan, force: bool, jobs: int | None) -> Path:
    """Return the wheel of this plan, from the cache unless `force`, or built with
    `jobs` compilers at a time.

    Raises BuildError if the build fails.
    """
    wheel = None if force else cached_wheel(plan.key)
    if wheel is not None:
        say(f"wheel {plan.key} is in the cache")
        return wheel
    return build(plan, jobs or default_jobs())


def build(plan: Plan, jobs: int) -> Path:
    """Fetch, patch and compile the release; return the wheel in the cache. Raises BuildError."""
    log = cache_folder() / "logs" / f"{plan.key}.log"
    with workshop(log) as shop:
        log.write_text(json.dumps(plan.inputs(), indent=1) + "\n", encoding="utf-8")
        env = build_environment(plan, shop, jobs)
        with step(f"fetched horovod {RELEASE}"):
            archive = fetch_release(shop, env)
        with step(
            f"unpacked, applied {len(plan.patches)} patches and added {len(plan.sources)} files"
        ):
            with tarfile.open(archive) as tar:
                tar.extractall(shop.folder)  # noqa: S202 - pip has checked its digest
            tree = shop.folder / archive.name.removesuffix(".tar.gz")
            for patch in plan.patches:
                apply_patch(patch, tree)
            add_sources(plan.sources, tree)
        record = json.dumps(build_record(plan), indent=1) + "\n"
        (tree / "horovod" / "hvd_train_build.json").write_text(record, encoding="utf-8")
        say(f"compiling with {jobs} jobs (minutes); log: {log}")
        only_this = ["--no-deps", "--no-build-isolation", "--no-cache-dir"]
        command = shop.pip("wheel", "-v", *only_this, "-w", shop.folder / "wheel", tree)
        with step("compiled"):
            shop.run("compiling", command, env, show_progress())
        wheels = list((shop.folder / "wheel").glob("horovod-*.whl"))
        if not wheels:
            raise BuildError("compiling made no wheel", f"  full log: {log}")
        return publish(plan.key, wheels[0], plan.inputs())


def fetch_release(shop: Workshop, env: dict[str, str]) -> Path:
    """Return the source archive of the release, kept here or from pip, which checks it.

    Raises BuildError.
    """
    kept = cache_folder() / "sources" / f"horovod-{RELEASE}.tar.gz"
    if kept.exists() and file_digest(kept) == SHA256:
        return kept
    requirement, folder = shop.folder / "horovod.txt", shop.folder / "download"
    requirement.write_text(f"horovod=={RELEASE} --hash=sha256:{SHA256}\n", encoding="utf-8")
    source = ["--no-deps", "--no-build-isolation", "--no-binary", "horovod", "--require-hashes"]
    shop.run(
        f"fetching horovod {RELEASE} (is the package index reachable?)",
        shop.pip("download", *source, "-r", requirement, "-d", folder),
        # pip compares it
        {name: value for name, value in env.items() if name != "HOROVOD_LOCAL_VERSION"},
    )
    kept.parent.mkdir(exist_ok=True)
    shutil.copyfile(folder / kept.name, kept)  # a torn copy has another digest
    return folder / kept.name


def show_progress() -> Callable[[str], None]:
    """Return a function that reads make's output by lines, and prints
    how far the compilation is.
    """
    shown = 0

    def feed(line: str) -> None:
        nonlocal shown
        match = re.search(r"\[ *(\d+)%\]", line)
        if match and int(match[1]) >= shown + 5:
            shown = int(match[1])
            say(f"compiling {shown}%")

    return feed


def build_record(plan: Plan) -> dict[str, Any]:
    """Return the contents of horovod/hvd_train_build.json, which describes the wheel."""
    return {
        "horovod": RELEASE,
        "key": plan.key,
        "torch": plan.torch.version,
        "torch_cuda": plan.torch.cuda,
        "python": platform.python_version(),
        "gloo": True,
        "mpi": str(plan.mpi) if plan.mpi else None,
        "nccl": plan.cuda.nccl_version if plan.cuda else None,
        "nvcc": plan.cuda.version if plan.cuda else None,
        "cuda_archs": list(plan.cuda.archs) if plan.cuda else None,
        "compiler": plan.compiler.name,
        "patches": [
            {"name": patch.name, "file": patch.file, "why": patch.why} for patch in plan.patches
        ],
        "built": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def default_jobs() -> int:
    """Return the number of compilers to run at a time: one per processor, with 2
    GB of free memory for each.
    """
    try:
        info = Path("/proc/meminfo").read_text(encoding="utf-8")
        free_gb = int(re.findall(r"MemAvailable:\s+(\d+)", info)[0]) / 2**20
    except (OSError, IndexError):
        free_gb = 2.0
    return max(1, min(len(os.sched_getaffinity(0)), int(free_gb // 2)))


def build_environment(plan: Plan, shop: Workshop, jobs: int) -> dict[str, str]:
    """Return the environment variables of the build.

    Raises BuildError if the environment's MPI is damaged.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    for path in CMAKE_FILES:
        shop.copy_of(path)
    # torch; the environment's lib folder (MPI wheels)
    rpath = ["$ORIGIN/../../torch/lib", "$ORIGIN/../../../.."]
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
    return [
        folder for folder in dict.fromkeys(folders) if not folder.startswith(("/usr/lib", "/lib"))
    ]


def cuda_environment(plan: Plan, shop: Workshop, path: str, rpath: list[str]) -> dict[str, str]:
    """Return the variables that name the CUDA compiler and NCCL for Horovod,
    torch and our CMake file.

    Folders for the loader are added to `rpath`.
    """
    cuda = plan.cuda
    if cuda is None:
        return {"HOROVOD_WITHOUT_NVTX": "1"}
    home = shop.path(cuda.home)
    rpath += [
        f"$ORIGIN/../../nvidia/{part}/lib"
        for part in ("nccl", f"cu{cuda.version.split('.')[0]}", "cuda_runtime")
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
        # the nvcc 13.0 of the package index looks in lib64, which it does not have
        flags.append(f"-L{home / 'lib'}")
        if cudart := sorted((home / "lib").glob("libcudart.so.*")):
            env["HVD_BUILD_CUDART"] = str(cudart[0])
    env["NVCC_APPEND_FLAGS"] = " ".join(flags).strip()
    return env


@dataclass(frozen=True)
class Workshop:
    """The temporary folder of one build; its paths have no blank, even if
    the environment's path does.
    """

    folder: Path
    prefix: Path  # the environment
    log: Path

    def path(self, path: Path) -> Path:
        """Return a path of the environment through this folder's symlink; other paths unchanged."""
        with contextlib.suppress(ValueError):
            return self.prefix / path.relative_to(sys.prefix)
        return path

    def copy_of(self, path: Path) -> Path:
        """Copy a file into this folder and return the path of the copy."""
        return Path(shutil.copy(path, self.folder))

    def pip(self, *arguments: str | Path) -> list[str]:
        """Return a command that runs pip in the environment."""
        return [str(self.path(Path(sys.executable))), "-m", "pip", *map(str, arguments)]

    def run(
        self,
        what: str,
        command: list[str],
        env: dict[str, str],
        feed: Callable[[str], object] = len,
    ) -> None:
        """Run a command with its output in the log.

        Raises BuildError with errors from the log if it fails.
        """
        with self.log.open("a", encoding="utf-8") as log:
            print("$", shlex.join(command), file=log, flush=True)
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # so that make and its compilers can be ended together
            )
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    log.write(line)
                    feed(line)
            except BaseException:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
                raise
        if process.wait() != 0:
            errors = [f"  {line}" for line in first_errors(self.log)]
            raise BuildError(f"{what} failed", *errors, f"  full log: {self.log}")


@contextlib.contextmanager
def workshop(log: Path) -> Iterator[Workshop]:
    """Make the temporary folder of one build, and delete it afterwards; the log stays.

    Raises BuildError.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hvd_train-build-", dir=build_folder()) as name:
        folder = Path(name)
        prefix = Path(sys.prefix)
        if " " in sys.prefix:
            prefix = folder / "env"
            prefix.symlink_to(sys.prefix)
        yield Workshop(folder, prefix, log)


def first_errors(log: Path, limit: int = 4) -> list[str]:
    """Return up to `limit` different lines of a log that report errors,
    without mere consequences.
    """
    signs = re.compile(
        r"error:|CMake Error|undefined reference|No space left|Killed|ERROR:|cannot find -l"
    )
    noise = re.compile(
        r"Failed building wheel|subprocess-exited-with-error|returned non-zero|metadata-generation"
    )
    found = []
    with log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if signs.search(line) and not noise.search(line) and line.strip() not in found:
                found.append(line.strip())
    return [line[:200] for line in found[:limit]]
