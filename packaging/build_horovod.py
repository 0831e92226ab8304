#!/usr/bin/env python3
"""Build Horovod 0.28.1 for the PyTorch, CUDA, MPI and Python of this environment, and install it.

    python packaging/build_horovod.py             build (or take from the cache) and install
    python packaging/build_horovod.py --dry-run   print what was found and what would be built

Run it with the Python of the environment that Horovod is for, which must have torch, setuptools,
wheel, packaging and CMake 3. It also needs a C++ compiler, make and Python's headers. The release
comes from the package index by version and digest, gets the patches and the new files in this
folder, and is built with Gloo, with MPI if there is one, and with NCCL if torch has CUDA. The wheel
stays in a cache ($XDG_CACHE_HOME/hvd_train), so that the next environment of the same kind installs
it in seconds.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path

# Import from the folder of this file even if Python does not search it (-P, -I, PYTHONSAFEPATH).
sys.path.insert(0, str(Path(__file__).resolve().parent))

from horovod_build.cache import cached_wheel, say
from horovod_build.machine import BuildError, installed_version
from horovod_build.patches import load_patches
from horovod_build.plan import RELEASE, Plan, make_plan
from horovod_build.wheel import obtain_wheel, step


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line; a wrong one ends the process with a usage message."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what was found and the key; build nothing"
    )
    parser.add_argument(
        "--list-patches", action="store_true", help="list the patches with their reasons"
    )
    parser.add_argument(
        "--force", action="store_true", help="build and install even if that was done before"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="compilers at a time (default: by processors and free memory)",
    )
    parser.add_argument(
        "--wheel-dir", type=Path, metavar="DIR", help="put the wheel there; install nothing"
    )
    parser.add_argument(
        "--without-patches",
        action="store_true",
        help="build the release with only the patches that compiling needs (for comparison)",
    )
    parser.add_argument(
        "--without-mpi", action="store_true", help="Gloo only, even if there is an MPI"
    )
    parser.add_argument(
        "--without-cuda", action="store_true", help="for CPUs only, even if torch has CUDA"
    )
    parser.epilog = (
        "environment: CXX, CUDA_HOME (used if its major version is torch's), "
        "HOROVOD_NCCL_HOME, HOROVOD_BUILD_CUDA_CC_LIST (such as 80,90), TMPDIR, "
        "XDG_CACHE_HOME, and pip's own variables"
    )
    options = parser.parse_args(arguments)
    if options.jobs is not None and options.jobs < 1:
        parser.error("--jobs takes a number from 1")
    return options


def describe(plan: Plan) -> list[str]:
    """Return lines on what was found and what will be built."""
    cuda = plan.cuda
    if cuda:
        archs = ", ".join(str(arch) for arch in cuda.archs)
        gpu = f"nvcc {cuda.version} in {cuda.home}, NCCL {cuda.nccl_version}, for {archs}"
    else:
        gpu = "none: CPU only" + (f" (torch has CUDA {plan.torch.cuda})" if plan.torch.cuda else "")
    return [
        f"release:  {RELEASE} with {', '.join(patch.name for patch in plan.patches)}",
        f"python:   {platform.python_version()} in {sys.prefix}",
        f"torch:    {plan.torch.version}",
        f"compiler: {plan.compiler.name}",
        f"MPI:      {plan.mpi or 'none'}",
        f"CUDA:     {gpu}",
        f"key:      {plan.key}",
    ]


def install(wheel: Path, plan: Plan, force: bool) -> None:
    """Install the wheel and its dependencies, and check that it loads. Raises BuildError."""
    installed = installed_version("horovod")
    if installed == plan.version and not force:
        say(f"{plan.version} is installed already")
        return
    with step(f"installed {plan.version}"):
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        again = ["--force-reinstall", "--no-deps"] if force and installed else []
        must_run("installing the wheel failed", [*pip, *again, str(wheel)])
    with step("it loads"):
        check = "import horovod.torch as hvd; assert hvd.gloo_built()"
        must_run(
            "horovod was built and installed, but does not load", [sys.executable, "-c", check]
        )


def must_run(problem: str, command: list[str]) -> None:
    """Run a command without showing its output.

    Raises BuildError with its last lines of stderr if it fails.
    """
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise BuildError(problem, *(f"  {line}" for line in result.stderr.splitlines()[-4:]))


def main(arguments: list[str] | None = None) -> int:
    """Build and install Horovod; return the exit code."""
    options = parse_options(arguments)
    # SIGTERM ends the build as Ctrl-C does: no compiler keeps running, and the temporary folder is
    # deleted.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.list_patches:
            print(
                "\n".join(f"{patch.name:4}{patch.why}  [{patch.file}]" for patch in load_patches())
            )
            return 0
        plan = make_plan(options.without_patches, options.without_mpi, options.without_cuda)
        for line in describe(plan):
            say(line)
        if options.dry_run:
            state = "in the cache" if cached_wheel(plan.key) else "not built yet"
            say(f"wheel:    {state}")
            return 0
        wheel = obtain_wheel(plan, options.force, options.jobs)
        if options.wheel_dir:
            options.wheel_dir.mkdir(parents=True, exist_ok=True)
            say(f"wheel: {shutil.copy(wheel, options.wheel_dir)}")
        else:
            install(wheel, plan, options.force)
    except BuildError as error:
        for line in error.args:
            print(f"build_horovod: {line}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"build_horovod: {error.strerror or error}: {error.filename or ''}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("build_horovod: stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
