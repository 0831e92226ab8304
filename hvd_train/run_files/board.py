"""The numbers of a training as TensorBoard reads them.

torch's SummaryWriter is not used: its thread dies when the disk is full, and then raises for ever.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from typing_extensions import override

from hvd_train.run_files.appended_file import AppendedFile
from hvd_train.run_files.destination import Destination
from hvd_train.run_files.durable import Permission, always
from hvd_train.run_files.records import Ending, Numbers

_numbers = itertools.count()  # of this process's event files: two may be opened in the same second


class Board(Destination):
    """An event file of TensorBoard, open for writing."""

    def __init__(
        self, folder: Path, resumed_step: int, report: Callable[[str], None], permission: Permission = always
    ) -> None:
        """Begin a file in `folder`; TensorBoard forgets what other files there have of steps after `resumed_step`.

        For `report` and `permission` see AppendedFile.
        """
        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.{next(_numbers):06}"
        self._file = AppendedFile(folder / name, report, permission)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if resumed_step:
            start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=resumed_step + 1, session_log=start))

    @override
    def begin(self, names: Sequence[str]) -> None:
        pass

    @override
    def add(self, numbers: Numbers) -> None:
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.values.items()]
        self._write(Event(wall_time=numbers.time, step=numbers.step, summary=Summary(value=scalars)))

    @override
    def close(self, ending: Ending | None) -> None:
        self._file.close()

    def _write(self, event: Event) -> None:
        RecordWriter(self._file).write(event.SerializeToString())  # one write, with lengths and checksums around it
