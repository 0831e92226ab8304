"""Where numbers go, of real trainings on two ranks with all destinations at once."""

from __future__ import annotations

import csv
import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support import wandb_files
from tests.support.launching import HVD_TRAIN, finished, launch_line, ranks_of, started, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow]

COMMAND = [
    *launch_line("gloo", 2, HVD_TRAIN, "train", "digits", "--epochs", "4", "--output-dir", "run", "--log-steps", "5"),
    *("--commit-steps", "12", "--log-to", "tensorboard,wandb,mlflow,csv"),
]
VARIABLES = {
    "WANDB_MODE": "offline",
    "WANDB_X_DISABLE_STATS": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",
}
STEPS = list(range(5, 4 * 23 + 1, 5))  # 1,437 images, 64 a step
EPOCHS = [23, 46, 69, 92]


def values_of(run: Path, name: str) -> Mapping[str, list[tuple[int, float]]]:
    """Return steps and values of a number as each destination has them."""
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    client: Any = MlflowClient((run.parent / "mlruns").as_uri())
    (mlflow_run,) = client.search_runs([client.get_experiment_by_name("hvd_train").experiment_id])
    history = client.get_metric_history(mlflow_run.info.run_id, name)
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload().Scalars(name)
    with (run / "metrics.csv").open(newline="") as file:
        table = [(int(row["step"]), float(row[name])) for row in csv.DictReader(file) if row[name]]
    rows = [(row["_step"], row[name]) for row in wandb_files.history(run) if name in row]
    return {
        "csv": table,
        "wandb": rows,
        "mlflow": [(metric.step, metric.value) for metric in history],
        "tensorboard": [(event.step, event.value) for event in events],
    }


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_was_stopped_has_each_step_once_everywhere(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it could end in peace or not: it goes on as the same run of each service, with the same numbers."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    log = tmp_path / "log.txt"
    with started(COMMAND, tmp_path, log, VARIABLES) as process:
        wait_for("the second epoch", lambda: "epoch 2/4  loss" in log.read_text(), 200)
        for victim in ranks_of(process, HVD_TRAIN) if number == signal.SIGKILL else [process]:
            victim.send_signal(number)
        process.wait(120)
    code, output = finished(COMMAND, tmp_path, 300, VARIABLES)
    assert code == 0, output
    run = tmp_path / "run"
    for name, steps in (("train/loss", STEPS), ("val/top1", EPOCHS)):
        found = values_of(run, name)
        assert {where: [step for step, _ in values] for where, values in found.items()} == dict.fromkeys(found, steps)
        for values in found.values():
            assert [value for _, value in values] == pytest.approx([value for _, value in found["csv"]], rel=1e-6)
    summary = json.loads((run / "summary.json").read_text())
    assert wandb_files.summary(run)["best/top1"] == pytest.approx(summary["best_top1"])
    assert wandb_files.exit_codes(run)[-1] == 0
    assert len({file.name for file in wandb_files.files_of(run)}) == 1
