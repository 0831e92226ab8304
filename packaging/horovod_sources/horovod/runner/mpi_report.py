"""Run mpirun for horovodrun and read what it reports, so that a failed job ends in one line.

Open MPI reports a failed worker on stderr, in a box of several lines between two rows of dashes. The box is taken out
of the output and read; everything else passes through as it comes.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from horovod.runner.common.util import hosts
from horovod.runner.common.util.outcome import interrupted, worker_failed
from horovod.runner.common.util.safe_shell_exec import GRACEFUL_TERMINATION_TIME_S

_EDGE = re.compile(r"^-{20,}$")
_REPORT = re.compile(r"Primary job +terminated normally|(mpirun|prterun|mpiexec) (detected|noticed) that")
_EXIT = re.compile(r"Process name: +\[.*,(\d+)\].*?Exit code: +(\d+)", re.DOTALL)
_SIGNAL = re.compile(r"process rank (\d+) .*?exited on\s+signal (\d+)", re.DOTALL)


class MpirunReport:
    """Separates mpirun's report on a failed worker from all else that it prints on stderr.

    `failure` is the rank and the exit code (128 + N for signal N) of the first worker reported, None before that. What
    is no report goes to `write`, unchanged.
    """

    def __init__(self, write: Callable[[str], object]) -> None:
        self.failure: tuple[int, int] | None = None
        self._write = write
        self._box: list[str] | None = None

    def feed(self, line: str) -> None:
        """Take one line of mpirun's stderr, with its line end."""
        if self._box is None:
            if _EDGE.match(line.strip()):
                self._box = [line]
            else:
                self._write(line)
            return
        self._box.append(line)
        if _EDGE.match(line.strip()):
            self.close()

    def close(self) -> None:
        """End the open box, which may be half of one where the output ended: read it if it is a report, or write it."""
        box = "".join(self._box or [])
        self._box = None
        if not _REPORT.search(box):
            self._write(box)
            return
        exit_match, signal_match = _EXIT.search(box), _SIGNAL.search(box)
        if self.failure is None and exit_match:
            self.failure = (int(exit_match.group(1)), int(exit_match.group(2)))
        elif self.failure is None and signal_match:
            self.failure = (int(signal_match.group(1)), 128 + int(signal_match.group(2)))


def _write_stderr(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _end_with_parent() -> None:
    """Make the kernel send SIGTERM to mpirun when horovodrun is gone, even after kill -9 (Linux only).

    Runs in the child process, before mpirun starts; an exception here would keep mpirun from starting.
    """
    with contextlib.suppress(Exception):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG


def run_mpirun(command: str, env: Mapping[str, str], settings: Any) -> None:
    """Run a shell command line that starts mpirun; return when the job has succeeded.

    `settings` are horovodrun's: `hosts` and `num_proc` say on which host a rank runs. SIGINT and SIGTERM are passed on
    to mpirun as one SIGTERM, which gives the workers HVD_TRAIN_GRACE_SECONDS to finish.

    Raises JobFailedError where a worker failed, mpirun itself failed or a signal stopped the job.
    """
    grace = str(math.ceil(GRACEFUL_TERMINATION_TIME_S))
    env = dict(env)
    for name in ("OMPI_MCA_odls_base_sigkill_timeout", "PRTE_MCA_odls_base_sigkill_timeout"):
        env.setdefault(name, grace)

    # A session of its own: Ctrl-C in a terminal reaches horovodrun alone, which passes it on once. At a second signal
    # mpirun would kill the workers without waiting.
    mpirun = subprocess.Popen(  # noqa: S602 - horovodrun writes mpirun's command as a line for a shell
        "exec " + command,
        shell=True,
        env=env,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )
    received: list[int] = []

    def pass_on(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        if len(received) == 1:
            mpirun.terminate()

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, pass_on)

    report = MpirunReport(_write_stderr)

    def read() -> None:
        assert mpirun.stderr is not None
        # Line ends stay as they are: a worker may draw a progress bar with carriage returns.
        for line in io.TextIOWrapper(mpirun.stderr, encoding="utf-8", errors="replace", newline="\n"):
            report.feed(line)
        report.close()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    exit_code = mpirun.wait()
    reader.join(timeout=5)

    if received:
        raise interrupted(received[0])
    if exit_code < 0:
        exit_code = 128 - exit_code
    if report.failure:
        rank, exit_code = report.failure
        plan = hosts.get_host_assignments(hosts.parse_hosts(settings.hosts), settings.num_proc)
        host = plan[rank].hostname if rank < len(plan) else "unknown"
        raise worker_failed(f"rank {rank} on host {host}", exit_code)
    if exit_code != 0:
        raise worker_failed("a rank (see above)", exit_code)
