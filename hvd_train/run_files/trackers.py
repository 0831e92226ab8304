"""Write values of a training for programs that draw them: TensorBoard, CSV, Weights & Biases, MLflow (`--log-to`)."""

import importlib
import importlib.util
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hvd_train import plain_file
from hvd_train.errors import UsageError
from hvd_train.run_files.run_folder import RunFolder

TABLE = "metrics.csv"


def check(names: Sequence[str]) -> None:
    """Raise UsageError for a tracker whose library is not installed."""
    for name in names:
        if name in _LIBRARIES and importlib.util.find_spec(name) is None:
            raise UsageError(f"--log-to {name}: {name} is not installed: pip install {name}")


class Trackers:
    """Gives values to trackers by name. One that fails is reported and left out, and training goes without it."""

    def __init__(
        self,
        names: Sequence[str],
        folder: RunFolder,
        resumed_step: int,
        settings: Mapping[str, Any],
        report: Callable[[str], None],
    ) -> None:
        """Open the trackers of a run, which continue what an earlier process has begun."""
        self._report, self._trackers = report, dict[str, Board | Table | _Wandb | _Mlflow]()
        for name in names:
            with self._watched(name):
                if name in _LIBRARIES:
                    self._trackers[name] = _LIBRARIES[name](folder, settings)
                else:
                    self._trackers[name] = _FILES[name](folder, resumed_step, report)

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Give named values of a step to all trackers."""
        for name, tracker in list(self._trackers.items()):
            with self._watched(name):
                tracker.add(values, step)

    def close(self) -> None:
        """Close all trackers."""
        for name, tracker in list(self._trackers.items()):
            with self._watched(name):
                tracker.close()

    @contextmanager
    def _watched(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  # a library may raise anything, as when its server is down
            self._trackers.pop(name, None)
            line = f"{type(error).__name__}: {error}".splitlines()[0]
            self._report(f"--log-to {name}: {line}; nothing more goes there")


class Board:
    """Writes an event file of TensorBoard, without torch's SummaryWriter: a full disk breaks it for good."""

    def __init__(self, folder: RunFolder, resumed_step: int, report: Callable[[str], None]) -> None:
        """Begin a file; TensorBoard then drops later steps of earlier files. For `report` see AppendedFile."""
        from tensorboard.compat.proto import event_pb2, summary_pb2  # slow to import, and only one rank needs it
        from tensorboard.summary.writer.record_writer import RecordWriter

        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"  # they are read in order
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._file = folder.append(f"tensorboard/{name}", report)
        self._records = RecordWriter(self._file)  # one write for each, with lengths and checksums around it
        self._write(file_version="brain.Event:2")
        if resumed_step:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(step=resumed_step + 1, session_log=start)

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Write named values of a step."""
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=self._summary(value=scalars))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())


class Table:
    """Writes lines of step, name and value into metrics.csv."""

    def __init__(self, folder: RunFolder, resumed_step: int, report: Callable[[str], None]) -> None:
        """Drop lines after `resumed_step`."""
        path = folder.path / TABLE
        lines = plain_file.read_text(path).splitlines() if path.exists() else []
        with folder.writing(TABLE) as file:
            kept = [line for line in lines[1:] if int(line.partition(",")[0] or 0) <= resumed_step]
            file.write("".join(f"{line}\n" for line in ("step,name,value", *kept)).encode())
        self._file = folder.append(TABLE, report)

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Write named values of a step."""
        self._file.write("".join(f"{step},{name},{value!r}\n" for name, value in values.items()).encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _Wandb:
    def __init__(self, folder: RunFolder, settings: Mapping[str, Any]) -> None:
        wandb: Any = importlib.import_module("wandb")
        name, known = folder.path.name, _known(folder, "wandb")
        self._run = wandb.init(dir=str(folder.path), name=name, id=known, resume="allow", config=dict(settings))
        self._run.define_metric("*", step_metric="step")  # its own step must not go back, as a run that resumes does
        folder.write("wandb-run", self._run.id)

    def add(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    def __init__(self, folder: RunFolder, settings: Mapping[str, Any]) -> None:
        self._library: Any = importlib.import_module("mlflow")
        known = _known(folder, "mlflow")
        run = self._library.start_run(run_id=known, run_name=folder.path.name)
        if known is None:
            folder.write("mlflow-run", run.info.run_id)
            self._library.log_params(settings)

    def add(self, values: Mapping[str, float], step: int) -> None:
        self._library.log_metrics(values, step=step)

    def close(self) -> None:
        self._library.end_run()


def _known(folder: RunFolder, name: str) -> str | None:
    """Return the name of the run at a tracker, or None before it has one."""
    path = folder.path / f"{name}-run"
    return plain_file.read_text(path) if path.exists() else None


_FILES: dict[str, type[Board] | type[Table]] = {"tensorboard": Board, "csv": Table}
_LIBRARIES: dict[str, type[_Wandb] | type[_Mlflow]] = {"wandb": _Wandb, "mlflow": _Mlflow}
