"""What is missing on this machine and what to type: all of it at once, before anything is downloaded."""

import os
import platform
import re
import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import List, Tuple

from environment_setup.headers import (
    can_fetch_headers,
    fetched_headers,
    foreign_headers,
    has_python_headers,
    headers_problem,
    package_of_python,
)
from environment_setup.machine import output_of

OLDEST_PYTHON = (3, 10)
NEWEST_PYTHON = (3, 13)
OLDEST_GCC = 11
OLDEST_DRIVERS = {12: 525, 13: 580}  # NVIDIA's, for each CUDA
DEVICE, DRIVER_VERSION = Path("/dev/nvidia0"), Path("/proc/driver/nvidia/version")


def machine_problems(venv_needed: bool) -> Tuple[List[str], bool]:
    """Return a line for each thing that is missing, and whether Python's headers must be fetched."""
    if not sys.platform.startswith("linux"):
        return ["this is {}: Horovod and this project run on Linux".format(platform.system())], False
    problems = venv_problems() if venv_needed else []
    compiler = compiler_command()
    problems += compiler_problems(compiler) + foreign_headers()
    fetch = False
    if not has_python_headers(compiler) and not has_python_headers(compiler, fetched_headers()):
        fetch = can_fetch_headers()
        if not fetch:
            problems.append(headers_problem())
    return problems, fetch


def driver_problems(constraints: Path, device: Path = DEVICE, version: Path = DRIVER_VERSION) -> List[str]:
    """Return a line if this machine has an NVIDIA GPU whose driver is too old for the torch that is pinned.

    With HVD_TRAIN_GPUS=no, for training on the CPU, or HVD_TRAIN_HASHES=no, for another torch, nothing is looked at.
    """
    if "no" in (os.environ.get("HVD_TRAIN_GPUS"), os.environ.get("HVD_TRAIN_HASHES")) or not device.exists():
        return []
    driver = cuda = None
    with suppress(OSError):
        driver = re.search(r"\b(\d+)\.\d+(\.\d+)?\b", version.read_text(encoding="utf-8"))
    with suppress(OSError):
        cuda = re.search(r"^cuda-toolkit==(\d+)\.", constraints.read_text(encoding="utf-8"), re.MULTILINE)
    oldest = OLDEST_DRIVERS.get(int(cuda.group(1))) if cuda else None
    if driver is None or cuda is None or oldest is None or int(driver.group(1)) >= oldest:
        return []
    return [
        "the NVIDIA driver is {}, and torch for CUDA {} needs {} or newer: install one; for training on the CPU with "
        "--device cpu type HVD_TRAIN_GPUS=no make {}; for another torch see docs/building.md".format(
            driver.group(), cuda.group(1), oldest, os.environ.get("MAKE_GOAL", "env")
        )
    ]


def python_problems(version: Tuple[int, int]) -> List[str]:
    """Return a line if this Python is too old: what to type, naming a newer one if there is one on the PATH."""
    if version >= OLDEST_PYTHON:
        return []
    names = ["python3.{}".format(minor) for minor in range(NEWEST_PYTHON[1], OLDEST_PYTHON[1] - 1, -1)]
    found = [name for name in names if output_of([name, "--version"])]
    advice = (
        "make PYTHON={} {}".format(found[0], os.environ.get("MAKE_GOAL", "env"))
        if found
        else "install Python 3.10 to 3.13 and type make PYTHON=python3.X"
    )
    return ["Python {}.{} is too old, 3.10 is the oldest supported: {}".format(*version, advice)]


def venv_problems() -> List[str]:
    """Return a line if Python cannot make an environment with pip: Debian has ensurepip in a package of its own."""
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        return ["Python's venv module is incomplete: apt install " + package_of_python("-venv")]
    return []


def compiler_command() -> List[str]:
    """Return the command of the C++ compiler, from CXX, g++ or c++; an empty list where there is none."""
    named = os.environ.get("CXX")
    for command in [shlex.split(named)] if named else [["g++"], ["c++"]]:
        if command and shutil.which(command[0]):
            return command
    return []


def compiler_problems(command: List[str]) -> List[str]:
    """Return a line if there is no compiler, or one that is too old for C++20."""
    if not command:
        named = os.environ.get("CXX")
        what = "CXX names {}, which is not there".format(named) if named else "there is no C++ compiler"
        return [what + " (Horovod is compiled here): apt install g++"]
    if "clang" in output_of([*command, "--version"]):
        return []
    version = output_of([*command, "-dumpfullversion", "-dumpversion"]).strip()
    with suppress(ValueError):
        if int(version.split(".")[0]) < OLDEST_GCC:
            return [
                "g++ {} is too old: torch's headers take g++ {old} or newer; "
                "apt install g++-{old} and type CXX=g++-{old} make".format(version, old=OLDEST_GCC)
            ]
    return []
