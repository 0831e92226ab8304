"""A run in MLflow's own file store, read back with its own client."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from hvd_train.run_files.journal import RunJournal
from hvd_train.run_files.mlflow_run import MlflowRun
from hvd_train.run_files.records import Ending, Numbers
from tests.unit.run_files.test_journal import epoch_record, step_record

SETTINGS = {"seed": 0, "run": {"output_dir": "x" * 1000, "tuned": None, "log_to": ["mlflow"]}}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(name, raising=False)


def client(store: Path = Path("mlruns")) -> Any:
    """Return MLflow's client of a store."""
    import mlflow

    return mlflow.MlflowClient(store.resolve().as_uri())


def only_run(experiment: str = "hvd_train", store: Path = Path("mlruns")) -> Any:
    """Return the one run of an experiment."""
    found = client(store).get_experiment_by_name(experiment)
    (run,) = client(store).search_runs([found.experiment_id])
    return run


def trained(resumed: int, epochs_done: int, *steps: int, ending: Ending | None = None) -> None:
    """Write these steps as a run in the folder `run` that goes on after step `resumed`; one of 3 steps is an epoch."""
    Path("run").mkdir(exist_ok=True)
    journal = RunJournal(Path("run"), resumed, epochs_done, live=False, log_to=["mlflow"], settings=SETTINGS)
    for step in steps:
        journal.step(step_record(step))
        if step == 3:
            journal.epoch(epoch_record(1, step))
    if ending is not None:
        journal.end(ending)
    journal.close()


def history(name: str) -> list[tuple[int, float]]:
    """Return steps and values of a metric of the one run."""
    return [(metric.step, metric.value) for metric in client().get_metric_history(only_run().info.run_id, name)]


def test_a_run_that_goes_on_is_one_run() -> None:
    """Steps that are taken again, also a whole end of an epoch, do not come twice; the state is that of the end."""
    trained(0, 0, 1, 2, 3, 4, ending=Ending("stopped"))
    assert only_run().info.status == "KILLED"
    trained(2, 0, 3, 4, 5)
    assert only_run().info.status == "RUNNING"
    trained(5, 1, 6, ending=Ending("finished", {"best/top1": 0.75, "test/loss": 0.5}))
    assert history("train/loss") == [(step, 0.5) for step in range(1, 7)]
    assert history("val/top1") == [(3, 0.75)]
    assert history("epoch") == [(step, 1.0) for step in range(1, 7)]
    assert history("best/top1") == [(6, 0.75)]
    run = only_run()
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "run"
    assert run.data.params["seed"] == "0"
    assert run.data.params["run.tuned"] == "none"
    assert len(run.data.params["run.output_dir"]) == 500


def test_a_run_that_fails_is_failed() -> None:
    """MLflow shows that."""
    trained(0, 0, 1, ending=Ending("failed"))
    assert only_run().info.status == "FAILED"


def test_the_store_and_the_experiment_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in every program with MLflow."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", Path("elsewhere").resolve().as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    trained(0, 0, 1)
    assert only_run("mine", Path("elsewhere")).data.metrics["train/loss"] == 0.5
    assert not Path("mlruns").exists()


def test_another_store_gets_the_run_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the run is not known it begins anew, with all that metrics.jsonl has."""
    trained(0, 0, 1, 2, 3)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", Path("elsewhere").resolve().as_uri())
    trained(3, 1, 4)
    run = only_run(store=Path("elsewhere"))
    steps = client(Path("elsewhere")).get_metric_history(run.info.run_id, "train/loss")
    assert [metric.step for metric in steps] == [1, 2, 3, 4]


def test_numbers_that_are_not_finite_are_taken() -> None:
    """MLflow has them as they are."""
    tracker = MlflowRun(Path(), {})
    assert tracker.open().startswith("MLflow: run ")
    values = {"train/loss": math.nan, "train/gradient_norm": math.inf}
    tracker.add([Numbers("step", step, 1, 1e9, values) for step in range(1, 601)])  # more than a server takes at once
    (run,) = client(Path("../mlruns")).search_runs(
        [client(Path("../mlruns")).get_experiment_by_name("hvd_train").experiment_id]
    )
    assert math.isnan(run.data.metrics["train/loss"])
    assert run.data.metrics["train/gradient_norm"] == math.inf
