"""The numbers of a training in MLflow."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from typing_extensions import override

from hvd_train.run_files.destination import Tracker
from hvd_train.run_files.durable import Permission, always
from hvd_train.run_files.masked import masked
from hvd_train.run_files.records import Ending, Numbers
from hvd_train.run_files.service_record import ServiceRecord

_EXPERIMENT = "hvd_train"
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_MOST_METRICS, _MOST_PARAMS, _LONGEST_PARAM = 1000, 100, 500  # what servers take at once, of any version


class MlflowRun(Tracker):
    """A run in MLflow: at MLFLOW_TRACKING_URI, or else in the folder `mlruns` beside the run folder."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], permission: Permission = always) -> None:
        """`settings` are the config of the run, which becomes its parameters."""
        self._folder, self._settings = folder, settings
        self._record = ServiceRecord(folder / "mlflow.json", permission)
        self._client: Any = None

    @override
    def open(self) -> str:
        import mlflow
        from mlflow.entities import Param

        # MLflow has no other store for who has no server and no database; without this it refuses.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        beside = self._folder.resolve().parent / "mlruns"
        uri = _chosen_uri() or beside.as_uri()
        self._client = client = mlflow.MlflowClient(uri)
        run = self._existing() or self._created()
        params = dict(_flat(self._settings))
        missing = iter([Param(name, value) for name, value in params.items() if name not in run.data.params])
        while some := list(islice(missing, _MOST_PARAMS)):
            client.log_batch(run.info.run_id, params=some)
        return f"MLflow: run {run.info.run_id} in {uri.removeprefix('file://')}"

    @override
    def is_new(self, numbers: Numbers) -> bool:
        return self._record.is_new(numbers)

    @override
    def add(self, several: Sequence[Numbers]) -> None:
        from mlflow.entities import Metric

        metrics = iter(
            [
                Metric(name, float(value), round(numbers.time * 1000), numbers.step)
                for numbers in several
                for name, value in {**numbers.values, **_epoch(numbers)}.items()
            ]
        )
        self._record.sending(several)
        while some := list(islice(metrics, _MOST_METRICS)):
            self._client.log_batch(self._record.id, metrics=some)

    @override
    def close(self, ending: Ending | None) -> None:
        if ending is not None:
            self._client.set_terminated(self._record.id, _STATUS[ending.how])

    @override
    def abandon(self) -> None:
        pass  # its thread ends with the process

    def _existing(self) -> Any:
        """Return the run of earlier, which goes on; None where there is none, or the server does not know it."""
        from mlflow.exceptions import MlflowException

        if not self._record.id:
            return None
        try:
            run = self._client.get_run(self._record.id)
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise
        self._client.update_run(self._record.id, status="RUNNING")
        return run

    def _created(self) -> Any:
        from mlflow.tracking.context import registry

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _EXPERIMENT
        experiment = os.environ.get("MLFLOW_EXPERIMENT_ID") or self._experiment(name)
        self._record.begin("")  # where this cannot be written, no run is begun that nobody would go on with
        tags = registry.resolve_tags()  # who started it, which program, which commit
        run = self._client.create_run(experiment, int(time.time() * 1000), tags, self._folder.resolve().name)
        self._record.begin(run.info.run_id)
        return run

    def _experiment(self, name: str) -> str:
        """Return the id of an experiment, which is made where it is missing: perhaps by another run right now."""
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)


def _chosen_uri() -> str | None:
    """Return the address that the environment, or the user's program, has chosen."""
    mlflow: Any = importlib.import_module("mlflow")
    return str(mlflow.get_tracking_uri()) if mlflow.is_tracking_uri_set() else None


def _epoch(numbers: Numbers) -> dict[str, float]:
    """Return the epoch as a metric, once for each step."""
    return {"epoch": numbers.epoch} if numbers.kind == "step" and numbers.epoch is not None else {}


def _flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield settings as `group.name` and text."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            text = "none" if value is None else masked(str(value))
            yield f"{before}{name}", text if len(text) <= _LONGEST_PARAM else f"{text[: _LONGEST_PARAM - 3]}..."
