"""Child processes that the doctor starts, and that end with it, whatever happens.

What a child starts ends with it, too, even in sessions of its own as horovodrun's workers are: all of it inherits
environment variables that name the doctor and the child.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from hvd_train.launch import processes

_GROUP, _CHILD = "HVD_TRAIN_DOCTOR", "HVD_TRAIN_DOCTOR_CHILD"
_GRACE_S = 3.0


@dataclass(frozen=True)
class Outcome:
    """How a child process ended: `code` is None where it did not end in time, and negative for a signal."""

    code: int | None
    output: str
    """All it wrote to standard output and standard error."""
    seconds: float = 0.0


class Child:
    """A running child process. Its output goes to a file: an orphan could hold a pipe open and let us wait for ever."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> None:
        """Start `command`; where it cannot be started, its outcome says so with exit code 127, as a shell does."""
        self.marks = {name: environ[name] for name in (_GROUP, _CHILD)}
        self.timeout_s = timeout_s
        self.started = time.monotonic()
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # it is open as long as this object
        self.process: subprocess.Popen[bytes] | None = None
        try:
            self.process = subprocess.Popen(
                command,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=self.output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self.output.write(f"{type(error).__name__}: {error}".encode())

    def outcome(self) -> Outcome:
        """Wait until the child ends, or end it when its time is up."""
        code: int | None = 127
        if self.process is not None:
            try:
                code = self.process.wait(max(0.0, self.started + self.timeout_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = None
        seconds = time.monotonic() - self.started
        _end([self])
        self.output.seek(0)
        return Outcome(code, self.output.read().decode(errors="replace"), seconds)


class Children:
    """Starts child processes, and ends them with all that they started."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._marks = {_GROUP: f"{os.getpid()}-{secrets.token_hex(4)}"}
        self._folder = tempfile.TemporaryDirectory(prefix="hvd-doctor-")  # MPI leaves files in its TMPDIR
        self._environ = {**environ, "TMPDIR": self._folder.name, **self._marks}
        self._started: list[Child] = []

    def start(self, command: Sequence[str | Path], timeout_s: float) -> Child:
        """Start a command that has `timeout_s` seconds from now on."""
        environ = {**self._environ, _CHILD: str(len(self._started))}
        self._started.append(Child([str(word) for word in command], environ, timeout_s))
        return self._started[-1]

    def end(self) -> None:
        """End all children and all that they started, and remove their temporary files."""
        try:
            _end([child for child in self._started if child.process and child.process.poll() is None])
        finally:
            _kill_marked(self._marks)
            self._folder.cleanup()


@contextmanager
def children(environ: Mapping[str, str]) -> Iterator[Children]:
    """Open a block in which children can be started with this environment; none outlives the block."""
    group = Children(environ)
    try:
        yield group
    finally:
        group.end()


def _end(children: Sequence[Child]) -> None:
    """Ask children to end and give launchers a moment to tidy up, then kill what is left of them."""
    running = [child.process for child in children if child.process is not None and child.process.poll() is None]
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    for child in children:
        # Python's resource tracker outlives horovodrun for a moment: it takes its semaphores out of /dev/shm.
        while processes.started_with(child.marks) and time.monotonic() < deadline:
            time.sleep(0.02)
        _kill_marked(child.marks)
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):  # a broken driver can hold nvidia-smi in the kernel
            process.wait(_GRACE_S)


def _kill_marked(marks: Mapping[str, str]) -> None:
    """Kill all processes that inherited these environment variables."""
    deadline = time.monotonic() + _GRACE_S
    # Until there are none: one may fork while the others are looked through, and a kill is not an end yet.
    while (found := processes.started_with(marks)) and time.monotonic() < deadline:
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.005)
