"""Child processes of the doctor, which end with it, together with their descendants."""

import contextlib
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from typing import IO

import psutil

from hvd_train.launch import processes

_GRACE_S = 10.0  # horovodrun gives its workers 5 s


@dataclass(frozen=True)
class Outcome:
    """How a child ended, with its output. `code` is None after a timeout, and negative after a signal."""

    code: int | None
    output: str
    seconds: float = 0.0


class Child:
    """A running command. Its output goes to a file: an orphan could hold a pipe open for ever."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> None:
        self.timeout_s, self.started = timeout_s, time.monotonic()
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # it is open as long as this object
        command, env = ["/usr/bin/env", *command], dict(environ)  # exit code 127: there is no such program
        self.process = Popen(command, env=env, stdin=DEVNULL, stdout=self.output, stderr=STDOUT, start_new_session=True)

    def outcome(self) -> Outcome:
        """Wait until the child ends; terminate it when its time is up."""
        code: int | None = None
        with contextlib.suppress(TimeoutExpired):
            code = self.process.wait(max(0.0, self.started + self.timeout_s - time.monotonic()))
        seconds = time.monotonic() - self.started
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.send(number):
                with contextlib.suppress(TimeoutExpired):  # a broken driver can hold nvidia-smi in the kernel
                    self.process.wait(_GRACE_S)
        self.output.seek(0)
        return Outcome(code, self.output.read().decode(errors="replace"), seconds)

    def send(self, number: signal.Signals) -> bool:
        """Send a signal to the child's process group; return False if the child has ended."""
        if runs := self.process.poll() is None:
            os.killpg(self.process.pid, number)
        return runs


@dataclass
class Children:
    """Starts child processes with an environment."""

    environ: Mapping[str, str]
    started: list[Child] = field(default_factory=list)

    def start(self, command: Sequence[str | Path], timeout_s: float) -> Child:
        """Start a command that has to end within `timeout_s` seconds."""
        self.started.append(Child([str(word) for word in command], self.environ, timeout_s))
        return self.started[-1]


@contextmanager
def children(environ: Mapping[str, str]) -> Iterator[Children]:
    """Start child processes in a block; none of their descendants or files outlives it."""
    # horovodrun starts its workers in sessions of their own, so an environment variable marks every descendant.
    mark = {"HVD_TRAIN_DOCTOR": f"{os.getpid()}-{secrets.token_hex(4)}"}
    with tempfile.TemporaryDirectory(prefix="hvd-doctor-") as folder:  # MPI leaves files in its TMPDIR
        group = Children({**environ, "TMPDIR": folder, **mark})
        try:
            yield group
        finally:
            for child in group.started:
                child.send(signal.SIGTERM)
            kill_at = time.monotonic() + _GRACE_S
            while (left := processes.started_with(mark)) and time.monotonic() < kill_at + _GRACE_S:
                for process in left if time.monotonic() > kill_at else ():
                    with contextlib.suppress(psutil.Error):
                        process.kill()
                time.sleep(0.02)
