"""End a failed job with one line and the exit code of the worker that failed."""

from __future__ import annotations

import contextlib
import os
import signal

from horovod.runner.common.util.safe_shell_exec import GRACEFUL_TERMINATION_TIME_S


class JobFailedError(RuntimeError):
    """The job failed: the text is the line to print, `exit_code` is horovodrun's exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def describe_exit(exit_code: int) -> str:
    """Describe an exit code in words. As in shells, 128 + N stands for signal N."""
    if exit_code > 128:
        with contextlib.suppress(ValueError):  # there is no such signal: an ordinary exit code
            why = ", as the kernel does if memory is short" if exit_code == 128 + signal.SIGKILL else ""
            return f"was killed by signal {exit_code - 128} ({signal.Signals(exit_code - 128).name}){why}"
    return f"ended with exit code {exit_code}"


def worker_failed(who: str, exit_code: int) -> JobFailedError:
    """Return the error of a job whose worker, such as "rank 1 on host h1", failed."""
    return JobFailedError(f"{who} {describe_exit(exit_code)}; the other ranks were stopped", exit_code)


def interrupted(signum: int) -> JobFailedError:
    """Return the error of a job whose launcher received a signal; its exit code is 128 + N."""
    name = signal.Signals(signum).name
    return JobFailedError(f"stopped by {name}; all ranks were stopped", 128 + signum)


def say_stopping(signum: int) -> None:
    """Print to stderr that a signal stops the job. Safe in a signal handler."""
    name = signal.Signals(signum).name
    line = f"horovodrun: {name}: stopping; the ranks have {GRACEFUL_TERMINATION_TIME_S:g} s to commit what they did\n"
    with contextlib.suppress(OSError):
        os.write(2, line.encode())
