"""Exported models, for use without this package."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hvd_train.cli import run
from hvd_train.errors import UsageError
from hvd_train.export import export
from hvd_train.run import evaluate
from tests.support.runs import equal

PROGRAM = """
import json, sys, torch
from sklearn.datasets import load_digits
import numpy as np
card = json.load(open("out/model.json"))
raw = load_digits()
test = np.random.default_rng(1998).permutation(len(raw.target))[:360]
images = torch.from_numpy((raw.images[test] * (255 / 16)).round()).float()[:, None] / 255
mean, std = (torch.tensor(card[name]).view(-1, 1, 1) for name in ("mean", "std"))
logits = torch.export.load("out/model.pt2").module()((images - mean) / std)
assert "hvd_train" not in sys.modules
print((logits.argmax(1).numpy() == raw.target[test]).mean())
"""


@pytest.fixture
def trained_run() -> Path:
    assert run(["train", "digits", "--epochs", "1", "--output-dir", "run", "--device", "cpu"]) == 0
    return Path("run")


@pytest.mark.slow
def test_the_exported_program_runs_without_this_package(trained_run: Path) -> None:
    """It has the same score, for any number of images, with the normalization of model.json."""
    written = export(trained_run, Path("out"))
    assert [path.name for path in written] == ["weights.pt", "model.pt2", "model.json"]
    command = [sys.executable, "-c", PROGRAM]
    accuracy = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=280).stdout
    assert float(accuracy) == pytest.approx(evaluate(trained_run)["top1"])


def test_an_export_has_the_best_weights(trained_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that differs is refused."""
    export(trained_run, Path("out"))
    assert equal(
        *(torch.load(path, weights_only=True) for path in ("out/weights.pt", "run/model-best.pt"))
    )
    assert json.loads(Path("out/model.json").read_text())["input"] == ["batch", 1, 8, 8]
    other = SimpleNamespace(module=lambda: lambda images: torch.zeros(len(images), 10))
    monkeypatch.setattr(torch.export, "load", lambda path: other)
    with pytest.raises(UsageError, match="gives other logits than the model"):
        export(trained_run, Path("out"))
