"""Write metrics for TensorBoard, without torch's SummaryWriter: a full disk breaks it for good."""

import itertools
import os
import socket
import time
from collections.abc import Callable, Mapping

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from hvd_train.run_files.run_folder import RunFolder

_numbers = itertools.count()  # TensorBoard reads the files of one second in the order of their names


class Board:
    """Writes an event file of TensorBoard."""

    def __init__(self, folder: RunFolder, resumed_step: int, report: Callable[[str], None]) -> None:
        """Begin a file; TensorBoard then drops later steps of earlier files. For `report` see AppendedFile."""
        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.{next(_numbers):04}"
        self._file = folder.append(f"tensorboard/{name}", report)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if resumed_step:
            start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=resumed_step + 1, session_log=start))

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Write named values of a step."""
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: Event) -> None:
        RecordWriter(self._file).write(event.SerializeToString())  # one write, with lengths and checksums around it
