"""Run mpirun for horovodrun: a signal gives the ranks time to commit, and the first that fails gives the exit code."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from horovod.runner import mpi_rank
from horovod.runner.common.util import hosts
from horovod.runner.common.util.outcome import interrupted, worker_failed
from horovod.runner.common.util.safe_shell_exec import GRACEFUL_TERMINATION_TIME_S, prefix_connection
from horovod.runner.gloo_run import register_shutdown_event
from horovod.runner.util.threads import in_thread

_NOTICE = re.compile("(.*)" + mpi_rank.NOTICE.format(r"(\d+)", r"(\d+)") + r"\s*", re.DOTALL)
_TAG = re.compile(r"([^\[]*\[[^\]]*\](<stderr>)?:?)?\s*")  # mpirun's prefix of a line: time, rank, stream
# The tag of the standard output of rank 0, which reports progress: of Open MPI 4, Open MPI 5, and MPICH.
_RANK_0 = re.compile(r"\[1,0\]<stdout>:|\[[^\],]*,0\]<stdout>: ?|^\[0\] ")
_OF_MPIRUN = re.compile(
    r".*: Forwarding signal \d+ to job\s*|(={20,})?\n|=   .*\n|"
    r"(YOUR APPLICATION TERMINATED|This typically|Please see the FAQ) .*\n"
)
_MARGIN_S = 5.0  # for signals to the ranks and back, and for mpirun to end


class _Output:
    """Pass on what ranks print: `codes` gets the exit codes of the ones that have ended, in this order."""

    def __init__(self, stream: TextIO, codes: dict[int, int]) -> None:
        self._stream, self._codes, self._bare = stream, codes, stream is sys.stdout
        self.flush, self.fileno = stream.flush, stream.fileno

    def write(self, text: str) -> None:
        if found := _NOTICE.fullmatch(text):
            self._codes.setdefault(int(found[2]), int(found[3]))
            if not _TAG.fullmatch(found[1]):
                self._stream.write(f"{found[1]}\n")
        elif not _OF_MPIRUN.fullmatch(text):
            self._stream.write(_RANK_0.sub("", text) if self._bare else text)


def guarded(command: list[str]) -> list[str]:
    """Return the command that mpirun starts on each rank instead of `command`; mpirun must not see a ":" in it."""
    grace = f"{GRACEFUL_TERMINATION_TIME_S:g}"
    return [sys.executable, "-I", "-S", os.path.abspath(mpi_rank.__file__), grace, shlex.join(command)]


def run_mpirun(command: str, env: Mapping[str, str], settings: Any) -> None:
    """Run a line for a shell that starts mpirun. Raises JobFailedError if a rank or mpirun fails, or after a signal."""
    ours = dict.fromkeys(("OMPI_MCA_odls_base_sigkill_timeout", "PRTE_MCA_odls_base_sigkill_timeout"), "0")
    # If a rank fails, the others have a second to commit; mpirun would kill them at once, and print a page.
    ours["OMPI_MCA_orte_abort_on_non_zero_status"] = "0"
    mpirun = subprocess.Popen(  # noqa: S602 - horovodrun writes mpirun's command as a line for a shell
        f"exec {command}",
        shell=True,
        env={**ours, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C in a terminal reaches horovodrun alone
        preexec_fn=lambda: mpi_rank.end_with_parent(signal.SIGUSR1),
    )
    stopping = register_shutdown_event()
    codes: dict[int, int] = {}
    streams = ((mpirun.stdout, _Output(sys.stdout, codes)), (mpirun.stderr, _Output(sys.stderr, codes)))
    readers = [in_thread(prefix_connection, args=(source, to, None, None, False)) for source, to in streams]
    while mpirun.poll() is None and not any(codes.values()) and not stopping.wait(0.1):
        pass
    deadline = time.monotonic() + (GRACEFUL_TERMINATION_TIME_S + _MARGIN_S if stopping.is_set() else 1.0)
    while mpirun.poll() is None and len(codes) < settings.num_proc and time.monotonic() < deadline:
        if stopping.is_set():
            mpirun.send_signal(signal.SIGUSR1)  # until it arrives: mpirun may still start
        time.sleep(0.2)
    for signum in (signal.SIGTERM, signal.SIGKILL):
        mpirun.send_signal(signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            mpirun.wait(_MARGIN_S)
    for reader in readers:
        reader.join(_MARGIN_S)

    if len(codes) == settings.num_proc and not any(codes.values()):
        return  # even if a signal came as the last rank finished
    if stopping.is_set():
        raise interrupted(stopping.signum)
    plan = hosts.get_host_assignments(hosts.parse_hosts(settings.hosts), settings.num_proc)
    for rank, code in codes.items():
        if code:
            raise worker_failed(f"rank {rank} on host {plan[rank].hostname}", code)
    if code := mpirun.returncode:
        raise worker_failed("a rank (see above)", code if code > 0 else 128 - code)
