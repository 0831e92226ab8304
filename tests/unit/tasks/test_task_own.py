"""Tasks of the user's own: how they are given, what a run writes about them, and how it is evaluated and resumed."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hvd_train import Config, Task, cli, config_file, evaluate, mean, train
from hvd_train.data.dataset import DataSet
from hvd_train.errors import UsageError
from hvd_train.plugin import Untrusted
from hvd_train.result import Result
from hvd_train.world.world import LocalWorld, World
from tests.support.own_tasks import FIGURES, HERE, errors, line, rows
from tests.support.runs import Weights, equal, largest_difference, small_config
from tests.support.task_runs import StopsAfter, on_ranks

NO_DATA = DataSet((), None)


def config(folder: str, **changes: Any) -> Config:
    """A config of three epochs of three steps, in slots of four samples."""
    return small_config(**{"output_dir": Path(folder), "epochs": 3, "global_batch_size": 8, **changes})


def trained(folder: str, world: World | None = None, **changes: Any) -> tuple[Result, Weights]:
    """Train with the user's function, with arguments as in `task_args`."""
    result = train(config(folder, **changes), model=line, data=rows, task=errors, world=world)
    return result, torch.load(Path(folder) / "model-final.pt", weights_only=True) if result.finished else {}


def records(folder: str, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_a_task_by_value_by_function_and_by_name_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """With the same arguments it makes the same weights, and `evaluate` finds by its name what has one."""
    _, expected = trained("function", task_args=("scale=0.5",))
    value = errors(NO_DATA, scale=0.5)
    result = train(config("value"), model=line, data=rows, task=value)
    assert equal(torch.load("value/model-final.pt", weights_only=True), expected)
    named = config("named", task=f"{HERE}:errors", model=f"{HERE}:line")
    Path("named.yaml").write_text(config_file.dump(named))
    flags = ["--data", f"{HERE}:rows", "--task-args", "scale=0.5"]
    assert cli.run(["train", "--config", "named.yaml", *flags]) == 0
    assert equal(torch.load("named/model-final.pt", weights_only=True), expected)
    assert "next:  hvd-train evaluate named --trust\n" in capsys.readouterr().out
    assert config_file.load(Path("function/config.yaml")).task.task == f"{HERE}:errors"

    best = evaluate(Path("value"), model=line, data=rows, task=value)
    assert best["median"] == result.best
    for run in ("function", "named"):
        assert evaluate(Path(run), trust=True).values == best.values
    with pytest.raises(UsageError, match=r"value was trained with a task that only its script knows: call "):
        evaluate(Path("value"), model=line, data=rows)


def test_a_task_of_a_run_is_not_imported_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither from Python nor by a command, though model and data are given; one line says what to type."""
    trained("run", epochs=1)
    with pytest.raises(Untrusted, match=rf"run names code \(task: {HERE}:errors\).*add --trust"):
        evaluate(Path("run"), model=line, data=rows)
    assert cli.run(["evaluate", "run"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert cli.run(["evaluate", "run", "--trust", "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert list(scores) == [*FIGURES, "count"]
    assert scores["count"] == 7
    assert cli.run(["config", "--config", "run/config.yaml", "--model", "digits-convnet", "--data", "digits"]) == 2
    assert f"run/config.yaml names code (task: {HERE}:errors)" in capsys.readouterr().err


def test_what_a_run_writes_has_the_names_of_the_task(capsys: pytest.CaptureFixture[str]) -> None:
    """Each step, each epoch and the summary have its figures; the console shows the loss and the one that decides."""
    result, _ = trained("run")
    out = capsys.readouterr().out
    steps, epochs, summary = (
        records("run", "step"),
        records("run", "epoch"),
        json.loads(Path("run/summary.json").read_text()),
    )
    in_training = ["loss", "bias"]
    assert all([name for name in FIGURES if name in step] == in_training for step in steps)
    for epoch in epochs:
        assert [name for name in FIGURES if name in epoch] == in_training
        assert [name for name in FIGURES if f"val_{name}" in epoch] == FIGURES
    assert [summary[name] for name in FIGURES] == [epochs[-1][f"val_{name}"] for name in FIGURES]
    medians = [epoch["val_median"] for epoch in epochs]
    assert summary["best_median"] == result.best == min(medians)
    assert summary["best_epoch"] == 1 + medians.index(min(medians))
    shown = [line for line in out.splitlines() if line.startswith("epoch ")]
    assert len(shown) == 3
    for line_shown, epoch in zip(shown, epochs, strict=True):
        of_training, of_val = f"  loss {epoch['loss']:.4f}", f"  val loss {epoch['val_loss']:.4f}"
        assert f"{of_training}{of_val}  val median error {epoch['val_median']:.4f}  " in line_shown
        assert "bias" not in line_shown
        assert "samples/s" in line_shown
    assert f"median error {medians[-1]:.4f} (best {min(medians):.4f}, epoch {result.best_epoch}), " in out
    assert records("run", "event")[0]["figures"][1] == {"name": "bias", "title": "bias", "better": None, "form": ".3f"}


def test_figures_by_hand() -> None:
    """The median needs all samples, the spread is of evaluations alone, and the bias is a mean over samples."""
    trained("run", epochs=1)
    model = line(1)
    model.load_state_dict(torch.load("run/model-best.pt", weights_only=True))
    inputs, targets = rows(None)[1].tensors
    with torch.no_grad():
        wrong = (model(inputs) - targets).numpy()
    scores = evaluate(Path("run"), trust=True)
    assert scores["median"] == pytest.approx(np.median(np.abs(wrong)), rel=1e-6)
    assert scores["bias"] == pytest.approx(wrong.mean(), rel=1e-5)
    assert scores["spread"] == pytest.approx(targets.double().var(correction=0).item(), rel=1e-5)


def test_what_evaluations_keep_of_each_sample_is_put_together_from_all_ranks() -> None:
    """Two and three ranks find the same median, and training on them is the training of one."""
    alone, expected = trained("alone")
    for size in (2, 3):
        for result, weights in on_ranks(size, functools.partial(_on_a_rank, f"on-{size}")):
            assert largest_difference(weights, expected) <= 1e-5
            assert result.scores == pytest.approx(alone.scores, abs=1e-5)
        scores = on_ranks(size, lambda world: evaluate(Path("alone"), trust=True, world=world).values)
        assert scores == [pytest.approx(evaluate(Path("alone"), trust=True).values, rel=1e-12)] * size


def _on_a_rank(folder: str, world: World) -> tuple[Result, Weights]:
    built: list[torch.nn.Module] = []

    def model(outputs: int) -> torch.nn.Module:
        built.append(line(outputs))
        return built[0]

    return train(config(folder), model=model, data=rows, task=errors, world=world), dict(built[0].state_dict())


def test_a_checkpoint_goes_on_with_the_best_so_far() -> None:
    """Stopped in mid epoch and resumed, the run has the bits, the best epoch and the sums of one never stopped."""
    undisturbed, expected = trained("undisturbed")
    stopped, _ = trained("run", StopsAfter(5))
    assert (stopped.finished, stopped.steps) == (False, 5)
    result, weights = trained("run", LocalWorld())
    assert equal(weights, expected)
    assert (result.scores, result.best, result.best_epoch) == (
        undisturbed.scores,
        undisturbed.best,
        undisturbed.best_epoch,
    )
    figures = [f"{before}{name}" for before in ("", "val_") for name in FIGURES]
    read = [
        [[epoch.get(name) for name in figures] for epoch in records(run, "epoch")] for run in ("run", "undisturbed")
    ]
    assert read[0] == read[1]


def test_another_figure_can_decide() -> None:
    """--best-by and --target take any figure that has an order, in whichever direction it is better."""
    aimed, _ = trained("aim", target="loss=100")
    assert (aimed.epochs, aimed.why) == (1, "target loss 100.0000 reached")
    epochs = {}
    for best_by in ("loss", "greatest"):
        task = Task(
            loss=lambda predicted, targets: (predicted - targets).square(),
            measures=lambda predicted, targets: {"error": (predicted - targets).abs()},
            figures=(mean("error", better="higher"),),
            outputs=1,
        )
        epochs[best_by] = train(
            config(best_by, best_by=best_by.replace("greatest", "error")), model=line, data=rows, task=task
        ).best_epoch
    found = [[epoch[f"val_{name}"] for epoch in records("loss", "epoch")] for name in ("loss", "error")]
    assert epochs == {"loss": 1 + found[0].index(min(found[0])), "greatest": 1 + found[1].index(max(found[1]))}
    assert epochs["loss"] != epochs["greatest"]
