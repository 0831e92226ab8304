"""`hvd-train hosts`: check a host file, and write it as other launchers take it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from hvd_train.console import PROGRAM, show
from hvd_train.errors import UsageError
from hvd_train.flags import parse_flags
from hvd_train.launch import hosts

USAGE = "  hosts FILE               check a host file, and write it as Open MPI, MPICH or Slurm take it\n"


@dataclass(frozen=True)
class HostsOptions:
    """Check a host file (form, hosts named twice, slots, names that resolve here), or write it in another form."""

    file: Annotated[Path, tyro.conf.Positional]
    """Host file."""
    to: hosts.FileFormat | None = None
    """Print it in this form: horovod and openmpi are NAME slots=N, mpich is NAME:N, slurm a line for each task."""
    form: hosts.FileFormat = "horovod"
    """Format of the file; horovod, openmpi and mpich are read alike."""
    resolve: bool = True
    """Check that the names resolve here."""


def run(arguments: list[str]) -> int:
    """Print the checked hosts, or the file in another form, and return 0. Raises UsageError for a wrong file."""
    options = parse_flags(HostsOptions, arguments, f"{PROGRAM} hosts")
    found = hosts.read(options.file, options.form)
    if options.resolve and (unknown := hosts.unknown(found)):
        raise UsageError(f"{options.file}: unknown here: {', '.join(unknown)}; mend the name, or add it to /etc/hosts")
    show(hosts.written(found, options.to).removesuffix("\n") if options.to else hosts.describe(found))
    return 0
