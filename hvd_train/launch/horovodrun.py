"""Compose the horovodrun command line with which our own commands start ranks. No torch."""

import os
import shlex
import shutil
import sys
from pathlib import Path

from hvd_train.errors import UsageError


def program(name: str) -> str:
    """Return the path of a program next to this Python, or else on the PATH. Raises UsageError if there is none."""
    next_to_python = Path(sys.executable).with_name(name)
    found = str(next_to_python) if next_to_python.exists() else shutil.which(name)
    if found is None:
        raise UsageError(f"there is no {name} next to {sys.executable} or on the PATH: type `hvd-train doctor`")
    return found


def line(ranks: int, host_file: str | None, controller: str) -> list[str]:
    """Return the start of a horovodrun command, up to the program that the ranks run.

    `host_file` None means this machine; `controller` is `gloo` or `mpi`. Raises UsageError if horovodrun is missing.
    """
    hosts = [] if host_file is None else ["--hostfile", host_file]
    environment = _open_mpi_environment() if controller == "mpi" else []
    return [*environment, program("horovodrun"), "-np", str(ranks), *hosts, f"--{controller}"]


def _open_mpi_environment() -> list[str]:
    """Return an `env` command with the paths of Open MPI 4 on other hosts, as find_open_mpi of _launch.sh does."""
    daemon = Path(sys.executable).with_name("orted")
    if not daemon.exists():
        return []
    variables = {"OPAL_PREFIX": str(daemon.parents[1]), "OMPI_MCA_orte_launch_agent": shlex.quote(str(daemon))}
    return ["env", *(f"{name}={value}" for name, value in variables.items() if not os.environ.get(name))]
