"""What horovodrun says of a job that failed: which rank failed first, and why, below its own line. No torch.

`horovodrun` calls `watch` as it starts (patch L9 of our build of Horovod). From then on it keeps the last lines of each
rank, and looks at the memory of this host.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from typing import Any

from horovod.runner import gloo_run, mpi_rank, mpi_report
from horovod.runner.common.util import safe_shell_exec
from typing_extensions import override

from hvd_train.launch import addresses, failed_job
from hvd_train.launch.failed_job import End
from hvd_train.launch.memory_kills import Watch
from hvd_train.launch.printed import Printed, shown

_RANK_AND_HOST = re.compile(r"rank (\d+) on host (\S+)")
_OF_RANK = re.compile(r"\[(?:[^\]\s]*,)?(\d+)\]")  # what Open MPI and MPICH put before a line
_LONGEST_LINE = 1 << 16


def watch() -> None:
    """Let the launcher in this process say why a static job has failed; in our elastic driver nothing is done."""
    if safe_shell_exec.execute.__module__ != safe_shell_exec.__name__:  # it has taken its place
        return
    job = _Job()
    safe_shell_exec.execute = _keeping_lines(safe_shell_exec.execute, job)
    gloo_run.create_slot_env_vars = _noting_hosts(gloo_run.create_slot_env_vars, job)
    gloo_run.worker_failed = _in_words(gloo_run.worker_failed, job)
    mpi_report.worker_failed = _in_words(mpi_report.worker_failed, job)
    mpi_report.MpirunReport = _report_of(job)
    mpi_report.Untagged = _untagged_of(job)


class _Job:
    """The ranks of a static job: where they are, what they print, and how they have ended, in that order."""

    def __init__(self) -> None:
        self.watch = Watch()
        self.hosts: dict[int, str] = {}
        self.ends: list[End] = []
        self.printed: dict[int, Printed] = {}
        self._lock = threading.Lock()

    def of(self, rank: int) -> Printed:
        """Return what keeps the lines of a rank."""
        with self._lock:
            return self.printed.setdefault(rank, Printed())

    def ended(self, rank: int, exit_code: int) -> None:
        """Note how a rank has ended; a second call for the same rank says nothing new."""
        printed = self.of(rank)
        with self._lock:
            if rank not in (end.rank for end in self.ends):
                self.ends.append(End(rank, self.hosts.get(rank, ""), exit_code, printed))


# Each of these takes what Horovod has, and returns what replaces it.


def _keeping_lines(execute: Callable[..., int], job: _Job) -> Callable[..., int]:
    def replacement(
        command: Any, env: Any = None, stdout: Any = None, stderr: Any = None, index: int | None = None, **more: Any
    ) -> int:
        if index is None:  # no rank, but a question to a host
            return execute(command, env=env, stdout=stdout, stderr=stderr, **more)
        exit_code = execute(command, env, *shown(stdout, stderr, job.of(index)), index=index, **more)
        job.ended(index, exit_code)
        return exit_code

    return replacement


def _noting_hosts(create_slot_env_vars: Callable[[Any], Any], job: _Job) -> Callable[[Any], Any]:
    def replacement(slot_info: Any) -> Any:
        job.hosts[slot_info.rank] = slot_info.hostname
        return create_slot_env_vars(slot_info)

    return replacement


def _in_words(worker_failed: Callable[[str, int], Exception], job: _Job) -> Callable[[str, int], Exception]:
    def replacement(who: str, exit_code: int) -> Exception:
        match = _RANK_AND_HOST.fullmatch(who)
        if match is None:
            return worker_failed(who, exit_code)
        rank, host = int(match[1]), match[2]
        end = failed_job.first(job.ends) or End(rank, host, exit_code, job.of(rank))
        host = job.hosts.get(end.rank, host)  # mpirun's own ranks have been found in that order
        is_here = addresses.is_this_host(host)
        end = End(end.rank, host, end.exit_code, end.printed)
        lines = failed_job.summary(end, job.watch if is_here else None, sys.argv, job.printed.values())
        line = worker_failed(f"rank {end.rank} on host {host}", end.exit_code)
        return type(line)("\n".join([str(line), *lines]), end.exit_code)

    return replacement


def _report_of(job: _Job) -> type[Any]:
    class Report(mpi_report.MpirunReport):  # type: ignore[misc]  # Horovod has no types
        """Horovod's reader of what mpirun prints on standard error, which keeps the last lines of each rank."""

        @override
        def _write(self, text: str) -> None:
            if match := _OF_RANK.match(text):
                job.of(int(match[1])).take(text)
            super()._write(text)

        @override
        def _note(self, match: re.Match[str]) -> str:
            text: str = super()._note(match)
            if match[2] == mpi_rank.ENDED:
                job.ended(int(match[1]), int(match[3]))
                if failed := failed_job.first(job.ends):
                    self.failure = (failed.rank, failed.exit_code)
            return text

    return Report


def _untagged_of(job: _Job) -> type[Any]:
    class Untagged(mpi_report.Untagged):  # type: ignore[misc]  # Horovod has no types
        """Horovod's filter of what mpirun prints on standard output, which keeps the last lines of each rank."""

        def __init__(self) -> None:
            super().__init__()
            self._line = b""

        @override
        def feed(self, piece: bytes) -> bytes:
            *lines, rest = (self._line + piece).split(b"\n")
            self._line = rest[:_LONGEST_LINE]
            for line in lines:
                text = line.decode("utf-8", "replace")
                if match := _OF_RANK.match(text):
                    job.of(int(match[1])).take(text)
            printed: bytes = super().feed(piece)
            return printed

    return Untagged
