"""The folders of a checkout, the lists of packages to install, and a key for each step of a set-up."""

import hashlib
import os
import platform
import re
import shutil
from pathlib import Path
from typing import Dict, Iterable, List, NamedTuple, Optional

from environment_setup.machine import output_of, same_folder


class Checkout(NamedTuple):
    """The folders of one clone."""

    root: Path

    @property
    def venv(self) -> Path:
        """The folder of the environment."""
        return self.root / ".venv"

    @property
    def python(self) -> Path:
        """The Python of the environment."""
        return self.venv / "bin" / "python"

    @property
    def log(self) -> Path:
        """The file with everything that the steps print."""
        return self.root / "build" / "setup.log"


class Choice(NamedTuple):
    """What this machine has of its own and is therefore not taken from the package index; None where it has nothing."""

    mpicxx: Optional[str]
    cuda_home: Optional[str]

    def requirement_files(self) -> List[str]:
        """Return the names of the lists of packages to install."""
        names = ["run.txt", "build.txt", "dev.txt"]
        if self.cuda_home is None:
            names.append("nvcc.txt")
        if self.mpicxx is None:
            names.append("mpi.txt")
        return names


def locks(checkout: Checkout, python_version: str) -> Optional[Path]:
    """Return the folder of locks for this machine and Python, or None: then versions count, and digests do not.

    There are none for other processors, nor with HVD_TRAIN_HASHES=no, for an index with builds of its own.
    """
    folder = checkout.root / "requirements" / "python{}.{}".format(*python_version.split(".")[:2])
    wanted = os.environ.get("HVD_TRAIN_HASHES") != "no" and platform.machine() == "x86_64"
    return folder if wanted and folder.is_dir() else None


def find_choice(checkout: Checkout) -> Choice:
    """Look for an MPI and for a CUDA compiler of the right generation outside the environment."""
    own = checkout.venv / "bin"
    folders = [folder for folder in os.get_exec_path() if folder and not same_folder(Path(folder), own)]
    mpicxx = shutil.which("mpicxx", path=os.pathsep.join(folders))
    wanted = cuda_generation((checkout.root / "requirements" / "constraints.txt").read_text(encoding="utf-8"))
    for variable in ("HOROVOD_CUDA_HOME", "CUDA_HOME"):
        home = os.environ.get(variable)
        if home and nvcc_generation(Path(home)) == wanted:
            return Choice(mpicxx, home)
    return Choice(mpicxx, None)


def cuda_generation(constraints: str) -> str:
    """Return the major version of CUDA that the pinned torch is built for, or "" where it is not pinned."""
    match = re.search(r"^cuda-toolkit==(\d+)\.", constraints, re.MULTILINE)
    return match.group(1) if match else ""


def nvcc_generation(home: Path) -> str:
    """Return the major version of the nvcc in a CUDA folder, or "" where there is none that runs."""
    match = re.search(r"release (\d+)\.", output_of([str(home / "bin" / "nvcc"), "--version"]))
    return match.group(1) if match else ""


def digest_of(parts: Iterable[str], files: Iterable[Path]) -> str:
    """Return one digest of these texts and of the names and contents of these files."""
    total = hashlib.sha256()
    for part in parts:
        total.update(part.encode() + b"\0")
    for path in files:
        total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:16]


def step_keys(checkout: Checkout, choice: Choice, python_version: str) -> Dict[str, str]:
    """Return a key for each step, a digest of everything that the step depends on, including the steps before it."""
    requirements = [checkout.root / "requirements" / name for name in ("constraints.txt", *choice.requirement_files())]
    locked = locks(checkout, python_version)
    if locked is not None:
        requirements += [locked / name for name in choice.requirement_files()]
    builder = checkout.root / "packaging"
    recipe = [builder / "build_horovod.py", builder / "horovod.txt", *sorted(builder.glob("*.cmake"))]
    recipe += [*sorted((builder / "horovod_build").glob("*.py")), *sorted((builder / "patches").glob("*"))]
    recipe += sorted(path for path in (builder / "horovod_sources").rglob("*") if "__pycache__" not in path.parts)
    packages = digest_of([python_version], requirements)
    horovod = digest_of([packages, str(choice)], [path for path in recipe if path.is_file()])
    compiled = sorted((checkout.root / "hvd_train").rglob("*.[ch]"))
    project = digest_of([packages], [checkout.root / "pyproject.toml", *compiled])
    return {"packages": packages, "horovod": horovod, "project": project}
