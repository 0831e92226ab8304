#!/usr/bin/env python3
"""Write the exact versions and digests of all packages, with uv; `make lock` runs it.

    python packaging/lock.py               digests of the versions in requirements/constraints.txt
    python packaging/lock.py --upgrade     the newest versions that the lists in requirements/ allow

requirements/constraints.txt holds the versions for Python 3.10 and newer. requirements/locks/ holds a lock for each
list: all that it pulls in, with the digest of every file that the package index has of that version. What run.txt has
is not repeated in the others. audit.txt and docs.txt have environments of their own.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements"
LISTS = ("run", "build", "nvcc", "mpi", "dev")
ABOUT = "# The exact version of everything in the environment. `make lock` renews it.\n"


def write(uv: str, to: Path, about: str, *arguments: str | Path) -> str:
    """Write the output of `uv pip compile` to a file and return it. Raises CalledProcessError; uv prints the reason."""
    command = [uv, "pip", "compile", "--quiet", "--no-annotate", "--no-header", "--universal", "--python-version=3.10"]
    command += map(str, arguments)
    text = subprocess.run(command, cwd=REQUIREMENTS, check=True, stdout=subprocess.PIPE, text=True).stdout
    to.write_text(about + text, encoding="utf-8")
    return text


def main() -> int:
    """Write constraints and locks; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that the lists allow")
    upgrade = parser.parse_args().upgrade
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        print("lock: uv is missing beside this Python; type make env", file=sys.stderr)
        return 2
    constraints, locks = REQUIREMENTS / "constraints.txt", REQUIREMENTS / "locks"
    locks.mkdir(exist_ok=True)
    try:
        known: list[str | Path] = [] if upgrade else ["-c", constraints]
        write(uv, constraints, ABOUT, *known, *[f"{name}.txt" for name in LISTS])
        left_out: list[str] = []
        for name in LISTS:
            lock = write(
                uv, locks / f"{name}.txt", "", "--generate-hashes", "-c", constraints, *left_out, f"{name}.txt"
            )
            packages = re.findall(r"^([A-Za-z0-9_.-]+)==", lock, re.MULTILINE)
            left_out = left_out or [option for package in packages for option in ("--no-emit-package", package)]
        for name in ("audit.txt", "docs.txt"):
            known = [] if upgrade or not (locks / name).exists() else ["-c", locks / name]
            write(uv, locks / name, "", "--generate-hashes", *known, name)
    except subprocess.CalledProcessError:
        print("lock: uv found no versions that fit together (see above)", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
