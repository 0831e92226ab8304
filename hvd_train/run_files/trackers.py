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

# A tracker is two functions: one gets the values of a step by their names, the other closes it.
Tracker = tuple[Callable[[Mapping[str, float], int], object], Callable[[], object]]
_TABLE = "metrics.csv"


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
        self._report, self._trackers = report, dict[str, Tracker]()
        for name in names:
            with self._watched(name):
                if name in _LIBRARIES:
                    self._trackers[name] = _LIBRARIES[name](folder, settings)
                else:
                    self._trackers[name] = _FILES[name](folder, resumed_step, report)

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Give named values of a step to all trackers."""
        for name, (add, _) in list(self._trackers.items()):
            with self._watched(name):
                add(values, step)

    def close(self) -> None:
        """Close all trackers."""
        for name, (_, close) in list(self._trackers.items()):
            with self._watched(name):
                close()

    @contextmanager
    def _watched(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  # a library may raise anything, as when its server is down
            self._trackers.pop(name, None)
            line = f"{type(error).__name__}: {error}".splitlines()[0]
            self._report(f"--log-to {name}: {line}; nothing more goes there")


def _tensorboard(folder: RunFolder, resumed_step: int, report: Callable[[str], None]) -> Tracker:
    """Begin an event file; TensorBoard then drops later steps of earlier files. For `report` see AppendedFile.

    A full disk would break torch's SummaryWriter for good.
    """
    from tensorboard.compat.proto import event_pb2, summary_pb2  # slow to import, and only one rank needs it
    from tensorboard.summary.writer.record_writer import RecordWriter

    name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"  # they are read in order
    file = folder.append(f"tensorboard/{name}", report)
    records = RecordWriter(file)  # one write for each, with lengths and checksums around it

    def write(**content: Any) -> None:
        records.write(event_pb2.Event(wall_time=time.time(), **content).SerializeToString())

    def add(values: Mapping[str, float], step: int) -> None:
        scalars = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        write(step=step, summary=summary_pb2.Summary(value=scalars))

    write(file_version="brain.Event:2")
    if resumed_step:
        write(step=resumed_step + 1, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))
    return add, file.close


def _csv(folder: RunFolder, resumed_step: int, report: Callable[[str], None]) -> Tracker:
    """Append lines of step, name and value to metrics.csv, without lines after `resumed_step`."""
    path = folder.path / _TABLE
    lines = plain_file.read_text(path).splitlines() if path.exists() else []
    with folder.writing(_TABLE) as whole:
        kept = [line for line in lines[1:] if int(line.partition(",")[0] or 0) <= resumed_step]
        whole.write("".join(f"{line}\n" for line in ("step,name,value", *kept)).encode())
    file = folder.append(_TABLE, report)

    def add(values: Mapping[str, float], step: int) -> None:
        file.write("".join(f"{step},{name},{value!r}\n" for name, value in values.items()).encode())

    return add, file.close


def _wandb(folder: RunFolder, settings: Mapping[str, Any]) -> Tracker:
    wandb: Any = importlib.import_module("wandb")
    name, known = folder.path.name, _known(folder, "wandb")
    run = wandb.init(dir=str(folder.path), name=name, id=known, resume="allow", config=dict(settings))
    run.define_metric("*", step_metric="step")  # its own step must not go back, as a run that resumes does
    folder.write("wandb-run", run.id)
    return lambda values, step: run.log({**values, "step": step}), run.finish


def _mlflow(folder: RunFolder, settings: Mapping[str, Any]) -> Tracker:
    mlflow: Any = importlib.import_module("mlflow")
    known = _known(folder, "mlflow")
    run = mlflow.start_run(run_id=known, run_name=folder.path.name)
    if known is None:
        folder.write("mlflow-run", run.info.run_id)
        mlflow.log_params(settings)
    return lambda values, step: mlflow.log_metrics(values, step=step), mlflow.end_run


def _known(folder: RunFolder, name: str) -> str | None:
    """Return the name of the run at a tracker, or None before it has one."""
    path = folder.path / f"{name}-run"
    return plain_file.read_text(path) if path.exists() else None


_FILES = {"tensorboard": _tensorboard, "csv": _csv}
_LIBRARIES = {"wandb": _wandb, "mlflow": _mlflow}
