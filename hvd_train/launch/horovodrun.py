"""Starting ranks from a command of our own: the line that a user would type; no torch."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from hvd_train.errors import UsageError


def program(name: str) -> str:
    """The one beside this Python, which other hosts are to have in the same place; else the one on the PATH.

    Raises UsageError where there is none.
    """
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise UsageError(f"there is no {name} beside {sys.executable} or on the PATH: type `hvd-train doctor`")
    return found


def line(ranks: int, host_file: str | None, controller: str) -> list[str]:
    """`horovodrun`, for so many ranks, over `gloo` or `mpi`; what the ranks are to do comes after it."""
    where = [] if host_file is None else ["--hostfile", host_file]
    begin = _open_mpi_elsewhere() if controller == "mpi" else []
    return [*begin, program("horovodrun"), "-np", str(ranks), *where, f"--{controller}"]


def _open_mpi_elsewhere() -> list[str]:
    """Words that tell this environment's Open MPI 4 where its daemon and its files are on other hosts.

    Over ssh they have a PATH without this environment. As find_open_mpi in horovodrun_scripts/_launch.sh.
    """
    daemon = Path(sys.executable).with_name("orted")
    if not daemon.exists():
        return []
    said = {"OPAL_PREFIX": str(daemon.parents[1]), "OMPI_MCA_orte_launch_agent": shlex.quote(str(daemon))}
    return ["env", *(f"{name}={value}" for name, value in said.items() if not os.environ.get(name))]
