"""The roll call of an MPI job before Horovod starts, by mpi4py."""

import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from hvd_train.launch import launcher, mpi_roll_call

_TRANSPORTS = "OMPI_MCA_btl"


def leave_quickly(environ: MutableMapping[str, str]) -> None:
    """Exclude Open MPI's one-sided transfers over libfabric, unless the user lists transports.

    Neither Horovod nor we use them, and in Open MPI 4.1 closing them delays the end of a run by a second.
    """
    given = environ.get(_TRANSPORTS, "^")
    if given.startswith("^"):
        left_out = [name for name in given[1:].split(",") if name]
        environ[_TRANSPORTS] = "^" + ",".join(dict.fromkeys([*left_out, "ofi"]))


def call_roll(facts: Mapping[str, str]) -> Any:
    """Compare the `facts` of all ranks, if mpi4py uses the same MPI as Horovod.

    Returns the module `mpi4py.MPI` if this has initialized MPI, so that the caller must finalize it, else None.
    Raises: UsageError: on all ranks, if their facts differ.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    if MPI.Is_finalized() or len(_loaded_libraries()) != 1:
        return None
    initialized_before = MPI.Is_initialized()  # by the user's own script
    if not initialized_before:
        with mpi_roll_call.reporting_the_wait(launcher.launched(os.environ)):
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    mpi_roll_call.call(MPI.COMM_WORLD, facts)  # a rank that ends without finalizing makes mpirun end all at once
    return None if initialized_before else MPI


def _loaded_libraries() -> set[str]:
    """Return the MPI libraries in this process: Horovod's, and mpi4py's if it has loaded another one."""
    words = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines())
    return {word for word in words if re.search(r"/libmpi(ch)?\.so", word)}
