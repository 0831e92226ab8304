"""Write values of a training for programs that draw them: TensorBoard, Weights & Biases,
MLflow (`--log-to`).
"""

import importlib
import importlib.util
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import psutil

from hvd_train import plain_file
from hvd_train.errors import UsageError, first_line
from hvd_train.run_files.run_folder import RunFolder

# A tracker is two functions: one gets the values of a step by their names, the other closes it.
Tracker = tuple[Callable[[Mapping[str, float], int], object], Callable[[], object]]
_MOST_WAITING = 10_000  # records
_LAST_SECONDS = 20.0  # for a server to take the last records; launchers give a process 30 s to end


def check(names: Sequence[str]) -> None:
    """Raise UsageError for a tracker whose library is not installed."""
    for name in names:
        if name in _LIBRARIES and importlib.util.find_spec(name) is None:
            raise UsageError(f"--log-to {name}: {name} is not installed: pip install {name}")


def opened(
    names: Sequence[str],
    folder: RunFolder,
    resumed_step: int,
    settings: Mapping[str, Any],
    report: Callable[[str], None],
) -> list["InThread"]:
    """Return the trackers of a run, which continue what an earlier process has begun."""
    begins = {
        "tensorboard": partial(_tensorboard, folder, resumed_step, report),
        **{name: partial(begin, folder, settings) for name, begin in _LIBRARIES.items()},
    }
    return [InThread(name, begins[name], report) for name in names]


class InThread:
    """A tracker for which training never waits, and which is left out, with one line, once it
    fails.
    """

    def __init__(
        self, name: str, begin: Callable[[], Tracker], report: Callable[[str], None]
    ) -> None:
        self._name = name
        self._report = report
        self._failed = False
        self._waiting = queue.SimpleQueue[tuple[Mapping[str, float], int] | None]()
        # the program may end before
        self._thread = threading.Thread(target=self._work, args=(begin,), name=name, daemon=True)
        self._thread.start()

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Give it named values of a step."""
        if self._waiting.qsize() >= _MOST_WAITING:
            self._fail(f"no answer, and {_MOST_WAITING:,} records wait")
        elif not self._failed:
            self._waiting.put((values, step))

    def close(self) -> None:
        """Wait a while until it has all records, and report if it has not."""
        self._waiting.put(None)
        if not self._failed:
            self._thread.join(_LAST_SECONDS)
        if self._thread.is_alive():
            left = self._waiting.qsize()  # one is being sent, and the last one is no record
            self._fail(
                f"no answer within {_LAST_SECONDS:.0f} s, and up to {left} records are not sent"
            )
        if self._failed:
            threading.Thread(target=_end_service, daemon=True).start()

    def _work(self, begin: Callable[[], Tracker]) -> None:
        try:
            add, close = begin()
            while record := self._waiting.get():
                add(*record)
            close()
        except BaseException as error:  # noqa: BLE001  # a library may exit
            self._fail(f"{type(error).__name__}: {first_line(error)}")

    def _fail(self, why: str) -> None:
        if not self._failed:
            self._failed = True
            self._report(f"--log-to {self._name}: {why}; nothing more goes there")


def _tensorboard(folder: RunFolder, resumed_step: int, report: Callable[[str], None]) -> Tracker:
    """Begin an event file; TensorBoard then drops later steps of earlier files.

    For `report` see AppendedFile.

    A full disk would break torch's SummaryWriter for good.
    """
    # slow to import, and only one rank needs it
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.record_writer import RecordWriter

    # they are read in order
    name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
    file = folder.append(f"tensorboard/{name}", report)
    records = RecordWriter(file)  # one write for each, with lengths and checksums around it

    def write(**content: Any) -> None:
        records.write(event_pb2.Event(wall_time=time.time(), **content).SerializeToString())

    def add(values: Mapping[str, float], step: int) -> None:
        scalars = [
            summary_pb2.Summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
        ]
        write(step=step, summary=summary_pb2.Summary(value=scalars))

    write(file_version="brain.Event:2")
    if resumed_step:
        write(
            step=resumed_step + 1,
            session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START),
        )
    return add, file.close


def _wandb(folder: RunFolder, settings: Mapping[str, Any]) -> Tracker:
    wandb: Any = importlib.import_module("wandb")
    name = folder.path.name
    known = _known(folder, "wandb")
    run = wandb.init(
        dir=str(folder.path), name=name, id=known, resume="allow", config=dict(settings)
    )
    # its own step must not go back, as a run that resumes does
    run.define_metric("*", step_metric="step")
    folder.write("wandb-run", run.id)
    return lambda values, step: run.log({**values, "step": step}), run.finish


def _end_service() -> None:
    """Kill the process of wandb, if any, at the end of the program, which would wait for
    it and so for the server.
    """
    threading.main_thread().join()
    time.sleep(1)  # wandb closes its connection to it first
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has ended
            if child.name() == "wandb-core":
                child.kill()


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


_LIBRARIES = {"wandb": _wandb, "mlflow": _mlflow}
