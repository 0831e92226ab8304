"""Run mpirun for horovodrun and read its reports, so that a job ends at once, in one line and with the right code.

Each rank has a guard (`mpi_rank.py`), which reports on stderr when the rank starts and how it ends. horovodrun stops
the ranks through their guards, and mpirun only when all ranks have ended. Other failures are reported by Open MPI in a
box of several lines between two rows of dashes. Notices and boxes are read and removed from the output; everything
else passes through unchanged.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import IO, Any

from horovod.runner import mpi_rank
from horovod.runner.common.util import hosts
from horovod.runner.common.util.outcome import interrupted, say_stopping, worker_failed
from horovod.runner.common.util.safe_shell_exec import GRACEFUL_TERMINATION_TIME_S

_EDGE = re.compile(r"^-{20,}$")
_REPORT = re.compile(r"Primary job +terminated normally|(mpirun|prterun|mpiexec) (detected|noticed) that")
_EXIT = re.compile(r"Process name: +\[.*,(\d+)\].*?Exit code: +(\d+)", re.DOTALL)
_SIGNAL = re.compile(r"process rank (\d+) .*?exited on\s+signal (\d+)", re.DOTALL)
_NOTICE = re.compile(r"<horovodrun: rank (\d+) (started|ended) (\d+)>")
_FORWARDING = re.compile(r"(mpirun|prterun|mpiexec): Forwarding signal \d+ to job\s*")
_TAG = re.compile(r"([^\[]*\[[^\]]*\](<stderr>)?:?)?\s*")  # mpirun's prefix of a line: time, rank, stream
_MARGIN_S = 5.0  # for signals to the guards and back, and for mpirun to end


def guarded(command: list[str]) -> list[str]:
    """Return the command that mpirun starts on each rank instead of `command`."""
    grace = f"{GRACEFUL_TERMINATION_TIME_S:g}"
    return [sys.executable, "-I", "-S", os.path.abspath(mpi_rank.__file__), grace, shlex.join(command)]


class MpirunReport:
    """Separate the guards' notices and mpirun's report of a failed worker from other lines of stderr.

    `failure` is the rank and the exit code (128 + N for signal N) of the first worker reported, None before that;
    `started` holds the ranks that have started and `ended` the exit codes of those that have ended. Other lines
    go to `write`, unchanged, until `silent` is set.
    """

    def __init__(self, write: Callable[[str], object]) -> None:
        self.failure: tuple[int, int] | None = None
        self.started: set[int] = set()
        self.ended: dict[int, int] = {}
        self.silent = False
        self._show = write
        self._box: list[str] | None = None

    def feed(self, line: str) -> None:
        """Read one line of mpirun's stderr, with its line end."""
        line, count = _NOTICE.subn(self._note, line)
        if (count and _TAG.fullmatch(line)) or _FORWARDING.fullmatch(line):
            return
        if self._box is None:
            if _EDGE.match(line.strip()):
                self._box = [line]
            else:
                self._write(line)
            return
        self._box.append(line)
        if _EDGE.match(line.strip()):
            self.close()

    def _note(self, match: re.Match[str]) -> str:
        rank, what, code = int(match[1]), match[2], int(match[3])
        self.started.add(rank)
        if what == mpi_rank.ENDED:
            self.ended[rank] = code
            if code and self.failure is None:
                self.failure = (rank, code)
        return ""

    def _write(self, text: str) -> None:
        if not self.silent:
            self._show(text)

    def close(self) -> None:
        """End the open box, which may be unfinished: read it if it is a report, else write it."""
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


def _pass_on(output: IO[bytes]) -> None:
    """Pass on mpirun's standard output, even without a reader: otherwise mpirun would end the job."""
    binary = getattr(sys.stdout, "buffer", None)  # a notebook's has none
    while chunk := os.read(output.fileno(), 65536):
        if binary is None:
            sys.stdout.write(chunk.decode("utf-8", "replace"))
        else:
            binary.write(chunk)
        sys.stdout.flush()


def _end_with_parent() -> None:
    """Make the kernel send SIGTERM to mpirun when horovodrun is gone, even after kill -9 (Linux only).

    Runs in the child process, before mpirun starts; an exception here would keep mpirun from starting.
    """
    with contextlib.suppress(Exception):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG


def run_mpirun(command: str, env: Mapping[str, str], settings: Any) -> None:
    """Run a shell command line that starts mpirun; return when the job has succeeded.

    `settings` are horovodrun's: `hosts` and `num_proc` say on which host a rank runs. At SIGINT and SIGTERM, and if
    a rank fails, each rank gets one SIGTERM and HVD_TRAIN_GRACE_SECONDS to finish.

    Raises JobFailedError if a worker failed, mpirun itself failed or a signal stopped the job.
    """
    env = dict(env)
    # The guards wait for the ranks; mpirun would wait twice more, even if no rank is left.
    for name in ("OMPI_MCA_odls_base_sigkill_timeout", "PRTE_MCA_odls_base_sigkill_timeout"):
        env.setdefault(name, "0")

    # A session of its own: Ctrl-C in a terminal reaches horovodrun alone.
    mpirun = subprocess.Popen(  # noqa: S602 - horovodrun writes mpirun's command as a line for a shell
        "exec " + command,
        shell=True,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )
    news: queue.SimpleQueue[None] = queue.SimpleQueue()  # an entry for each line, each signal and mpirun's end
    received: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        if not received:
            say_stopping(signum)
        received.append(signum)
        news.put(None)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, note)

    report = MpirunReport(_write_stderr)

    def read() -> None:
        assert mpirun.stderr is not None
        # Line ends stay as they are: a worker may draw a progress bar with carriage returns.
        for line in io.TextIOWrapper(mpirun.stderr, encoding="utf-8", errors="replace", newline="\n"):
            report.feed(line)
            news.put(None)
        report.close()

    def wait() -> None:
        mpirun.wait()
        news.put(None)

    assert mpirun.stdout is not None
    readers = [threading.Thread(target=read, daemon=True)]
    readers += [threading.Thread(target=_pass_on, args=(mpirun.stdout,), daemon=True)]
    for reader in readers:
        reader.start()
    threading.Thread(target=wait, daemon=True).start()

    deadline: float | None = None
    stopped_by: int | None = None
    while mpirun.returncode is None:
        with contextlib.suppress(queue.Empty):
            news.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        if deadline is None and (received or report.failure):
            deadline = time.monotonic() + GRACEFUL_TERMINATION_TIME_S + _MARGIN_S
            stopped_by = None if report.failure else received[0]
            if len(report.started) == settings.num_proc:
                mpirun.send_signal(signal.SIGUSR1)
            else:
                # Not all are there, so none has trained; and mpirun may not be ready to pass a signal on.
                mpirun.terminate()
        if deadline is not None and (len(report.ended) == settings.num_proc or time.monotonic() > deadline):
            report.silent = True  # mpirun may report the end of the guards
            _end(mpirun)
    for reader in readers:
        reader.join(timeout=_MARGIN_S)

    if len(report.ended) == settings.num_proc and not any(report.ended.values()):
        return  # even if a signal came as the last rank finished
    if stopped_by is not None:
        raise interrupted(stopped_by)
    exit_code = mpirun.returncode
    if exit_code < 0:
        exit_code = 128 - exit_code
    if report.failure:
        rank, exit_code = report.failure
        plan = hosts.get_host_assignments(hosts.parse_hosts(settings.hosts), settings.num_proc)
        host = plan[rank].hostname if rank < len(plan) else "unknown"
        raise worker_failed(f"rank {rank} on host {host}", exit_code)
    if exit_code != 0:
        raise worker_failed("a rank (see above)", exit_code)


def _end(mpirun: subprocess.Popen[bytes]) -> None:
    """End mpirun after its ranks: by a second signal to the guards, else by force."""
    for signum in (signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL):
        mpirun.send_signal(signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            mpirun.wait(_MARGIN_S)
            return
