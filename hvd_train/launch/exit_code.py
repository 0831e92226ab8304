"""The exit code with which an elastic worker is about to end, as its last word to the driver.

The driver reads exit codes from the worker's process, on another host from its ssh; where that ssh has failed, this is
all it learns. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from hvd_train.launch import client
from hvd_train.launch.launcher import WORKER

EXIT_CODE = "exit_code"  # where the driver takes it
_ANSWER_S = 2.0


@contextmanager
def told_to_driver(environ: Mapping[str, str]) -> Iterator[None]:
    """Tell our driver the exit code with which the block ends: that of its SystemExit, or 1 for any other error.

    Outside elastic jobs, after a block without an error, or where the driver does not answer, nothing is said.
    """
    try:
        yield
    except BaseException as error:
        if WORKER in environ:
            code = error.code if isinstance(error, SystemExit) else 1
            number = 0 if code is None else code if isinstance(code, int) else 1
            with suppress(OSError):
                client.put(environ, f"{EXIT_CODE}/{environ[WORKER]}", str(number), _ANSWER_S)
        raise
