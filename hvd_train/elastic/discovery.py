"""The hosts that a job may use now, which the user's command prints every second."""

import subprocess
import threading
from collections.abc import Callable, Mapping

from hvd_train.console import say
from hvd_train.launch import hosts as host_files
from hvd_train.numerals import whole_number

_COMMAND_S = 30.0
_EVERY_S = 1.0


class HostCommand:
    """A shell command that prints one `NAME:SLOTS` or `NAME` a line."""

    def __init__(self, command: str, slots: int | None) -> None:
        """Give hosts that are printed without a number `slots` slots (default: 1)."""
        self._command, self._slots = command, slots or 1

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the number of slots by host; Horovod's launcher calls this.

        Raises: ValueError: in one line, if the command fails or prints something else;
        subprocess.TimeoutExpired: after 30 seconds.
        """
        command = ["sh", "-c", self._command]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMMAND_S)
        if done.returncode != 0:
            errors = done.stderr.strip().splitlines() or [f"{self._command} ended with exit code {done.returncode}"]
            raise ValueError(errors[-1])
        hosts = {}
        for line in filter(None, map(str.strip, done.stdout.splitlines())):
            printed = f"{self._command} printed {line!r}, which is"
            name, _, slots = line.partition(":")
            if slots and whole_number(slots) is None:
                raise ValueError(f"{printed} not NAME:SLOTS")
            if not host_files.is_name(name):
                raise ValueError(f"{printed} no name of a host: ssh might take it for an option")
            hosts[name] = int(slots or self._slots)
        return hosts


class Discovery:
    """Looks for hosts every second; after a failure the last list stays in force."""

    def __init__(self, find: Callable[[], Mapping[str, int]], report: Callable[[Mapping[str, int]], None]) -> None:
        """`find` returns slots by host, or raises ValueError, OSError or SubprocessError; `report` takes each list."""
        self._find, self._report = find, report
        self._problem = ""

    def watch(self, stopped: threading.Event) -> None:
        """Look now, and every second until `stopped` is set."""
        self.look()
        while not stopped.wait(_EVERY_S):
            self.look()

    def look(self) -> None:
        """Look once; print a problem when it first appears."""
        try:
            hosts = self._find()
        except (ValueError, OSError, subprocess.SubprocessError) as error:
            if str(error) != self._problem:
                say(f"hosts: {error}; the last list stays in force")
            self._problem = str(error)
            return
        self._problem = ""
        self._report(hosts)
