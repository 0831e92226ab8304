"""Run commands: for what they print, or as children that get the signals of this process."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

STOPPING: dict[int, int] = dict.fromkeys(
    (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1), signal.SIGTERM
)


def output_of(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command without input to its end, and return what it has printed; options of `run`."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        **options,
    )


def why_failed(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of the errors of a command, or its exit code."""
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def beside(words: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start a Python program that gets lines from this process; options of `Popen`."""
    return subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        **options,
    )


def ignore_signals() -> None:
    """Leave signals to the process for which this one works: a terminal sends them to both."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


class Child:
    """Runs commands, one after the other, and passes signals on to them; `passed` says
    as which signal (0: none).

    Under nohup SIGHUP stays ignored. `received` is the first one that has come, or 0.
    """

    def __init__(self, passed: Mapping[int, int]) -> None:
        self.received = 0
        self._got_other = False  # a signal that is no hangup
        self._passed = passed
        self._process: subprocess.Popen[bytes] | None = None
        for number in passed:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._pass_on)

    def run(
        self, command: Sequence[str], variables: Mapping[str, str] | None = None, **files: Any
    ) -> int:
        """Run the command and return its exit code; 128 + N if signal N ended it.

        `files` as of Popen.
        """
        environment = {**os.environ, **(variables or {})}
        # In its own process group: a terminal's Ctrl-C comes here, and is passed on once.
        with subprocess.Popen(
            command, start_new_session=True, env=environment, **files
        ) as self._process:
            if self.received:  # while it was starting
                self._process.send_signal(self._passed[self.received])
            code = self._process.wait()
        return code if code >= 0 else 128 - code

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        # A lost terminal sends several hangups, and after a second signal the launcher no longer
        # waits for commits.
        is_other = number != signal.SIGHUP
        is_due = not self.received or (is_other and self._got_other)
        self.received = self.received or number
        self._got_other = self._got_other or is_other
        if self._process is not None and is_due:
            self._process.send_signal(self._passed[number])
