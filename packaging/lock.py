#!/usr/bin/env python3
"""Write the exact versions and digests of all packages, with uv; `make lock` runs it.

    python packaging/lock.py               digests of the versions in requirements/constraints.txt
    python packaging/lock.py --upgrade     the newest versions that the lists in requirements/ allow

requirements/constraints.txt holds the versions for each supported Python. requirements/python3.X/ holds, for 64-bit
Intel and AMD processors, a lock for each list: all that it pulls in, with the digest of every file that the package
index has of that version. What run.txt has is not repeated in the others. audit.txt has an environment of its own.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from packaging.markers import Marker

REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
LISTS = ("run", "build", "nvcc", "mpi", "dev")
LINUX = {"sys_platform": "linux", "platform_machine": "x86_64", "platform_python_implementation": "CPython"}
ABOUT = """\
# The exact version of everything in the environment, for Linux and each supported Python. `make lock` renews it.
"""


def compiled(uv: str, *arguments: str | Path) -> str:
    """Return the output of `uv pip compile`. Raises CalledProcessError; uv prints the reason."""
    command = [uv, "pip", "compile", "--quiet", "--no-annotate", "--no-header", *map(str, arguments)]
    return subprocess.run(command, cwd=REQUIREMENTS, check=True, stdout=subprocess.PIPE, text=True).stdout


def for_each_python(versions: str) -> str:
    """Return the lines for Linux, with only the markers that name a Python version."""
    lines = []
    for line in versions.splitlines():
        package, _, marker = line.partition(" ; ")
        if marker and not any(Marker(marker).evaluate({**LINUX, "python_full_version": f"{p}.9"}) for p in PYTHONS):
            continue
        parts = [part for part in re.findall(r"python_full_version \S+ '[^']+'", marker) if "'3.1" in part]
        parts = [part for part in parts if not re.search(r"'3\.1[4-9]", part)]
        lines.append(package + (f" ; {' and '.join(parts)}" if parts else "") + "\n")
    return "".join(lines).replace("'", '"')


def names(lock: str) -> list[str]:
    """Return the names of the packages in a lock."""
    return re.findall(r"^([A-Za-z0-9_.-]+)==", lock, re.MULTILINE)


def main() -> int:
    """Write constraints and locks; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that the lists allow")
    upgrade = ["--upgrade"] if parser.parse_args().upgrade else []
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        print("lock: uv is missing beside this Python; type make env", file=sys.stderr)
        return 2
    constraints = REQUIREMENTS / "constraints.txt"
    try:
        known: list[str | Path] = [] if upgrade else ["-c", constraints]
        lists = [f"{name}.txt" for name in LISTS]
        text = ABOUT + for_each_python(compiled(uv, "--universal", "--python-version", PYTHONS[0], *known, *lists))
        constraints.write_text(text, encoding="utf-8")
        for python in PYTHONS:
            folder = REQUIREMENTS / f"python{python}"
            folder.mkdir(exist_ok=True)
            place: list[str | Path] = [
                "--generate-hashes",
                "--python-version",
                python,
                "--python-platform",
                "x86_64-manylinux_2_28",
            ]
            there: list[str] = []
            for name in LISTS:
                left_out = [option for package in there for option in ("--no-emit-package", package)]
                lock = compiled(uv, *place, "-c", constraints, *left_out, f"{name}.txt")
                there = there or names(lock)
                (folder / f"{name}.txt").write_text(lock, encoding="utf-8")
            audit = folder / "audit.txt"
            kept: list[str | Path] = [] if upgrade or not audit.exists() else ["-c", audit]
            audit.write_text(compiled(uv, *place, *kept, "audit.txt"), encoding="utf-8")
    except subprocess.CalledProcessError:
        print("lock: uv found no versions that fit together (see above)", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
