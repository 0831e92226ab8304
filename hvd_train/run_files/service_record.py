"""What a run folder remembers of its run at a service: under which name it goes on, and what has been sent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hvd_train import plain_file
from hvd_train.run_files import durable
from hvd_train.run_files.durable import Permission, always
from hvd_train.run_files.records import Numbers

_MOST_BYTES = 1 << 14


class ServiceRecord:
    """A small file, whole or absent, which whoever goes on with the run finds in the folder."""

    def __init__(self, path: Path, permission: Permission = always) -> None:
        """Read `path`; one that is missing, or none of ours, is as that of a run that has not begun."""
        self._path, self._permission = path, permission
        self.id: str | None = None
        """By which the service knows the run; None before it has begun there."""
        self._sent: dict[str, int] = {}
        with suppress(OSError, ValueError, AttributeError, RecursionError):
            found = json.loads(plain_file.read_text(path, _MOST_BYTES))
            name, sent = found.get("id"), found.get("sent")
            self.id = name if isinstance(name, str) else None
            self._sent = {kind: step for kind, step in sent.items() if type(step) is int}

    def begin(self, name: str) -> None:
        """Remember a run that begins at the service. Raises OSError where that cannot be written."""
        self.id, self._sent = name, {}
        self._write()

    def is_new(self, numbers: Numbers) -> bool:
        """Return whether no such numbers were sent, or were about to be."""
        return numbers.step > self._sent.get(numbers.kind, -1)

    def sending(self, several: Sequence[Numbers]) -> None:
        """Remember that these are about to be sent: should the process be killed now, they do not go twice."""
        for numbers in several:
            self._sent[numbers.kind] = max(numbers.step, self._sent.get(numbers.kind, -1))
        with suppress(OSError):  # a full disk is no reason not to send them
            self._write()

    def _write(self) -> None:
        durable.write_text(self._path, json.dumps({"id": self.id, "sent": self._sent}) + "\n", self._permission)
