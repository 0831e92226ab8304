"""A signal that ends a rank in native code is told with the lines of Python that led there, and by nobody else."""

from __future__ import annotations

import faulthandler
from collections.abc import MutableMapping

_STANDARD_ERROR = 2
# UCX, which comes with Open MPI even into jobs that use no MPI, takes the signals of crashes away from Python, and
# prints sixty lines of native frames. Without signals of its own it does neither.
_UCX_SIGNALS, _UCX_MODE = "UCX_ERROR_SIGNALS", "UCX_HANDLE_ERRORS"


def tell_where(environ: MutableMapping[str, str]) -> None:
    """Let this process, where a signal such as SIGSEGV ends it, print the frames of the thread that has met it.

    What the user has set for Python's faulthandler, or for UCX, stays. It must come before Horovod is imported.
    """
    if not faulthandler.is_enabled():
        faulthandler.enable(_STANDARD_ERROR, all_threads=False)
    if _UCX_MODE not in environ:
        environ.setdefault(_UCX_SIGNALS, "")
