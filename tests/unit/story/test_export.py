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


@pytest.fixture
def trained_run() -> Path:
    assert run(["train", "digits", "--epochs", "1", "--output-dir", "run", "--device", "cpu"]) == 0
    return Path("run")


@pytest.mark.slow
def test_the_exported_program_runs_without_this_package(trained_run: Path) -> None:
    """It has the same score, for any number of images, with the normalization of model.json."""
    written = export(trained_run, Path("out"))
    assert [path.name for path in written] == ["weights.pt", "model.pt2", "model.json"]
    program = (
        "import json, sys, torch\n"
        "from sklearn.datasets import load_digits\n"
        "import numpy as np\n"
        "card = json.load(open('out/model.json'))\n"
        "raw = load_digits()\n"
        "test = np.random.default_rng(1998).permutation(len(raw.target))[:360]\n"
        "images = torch.from_numpy((raw.images[test] * (255 / 16)).round()).float()[:, None] / "
        "255\n"
        "images = (images - torch.tensor(card['mean']).view(-1, 1, 1)) / "
        "torch.tensor(card['std']).view(-1, 1, 1)\n"
        "logits = torch.export.load('out/model.pt2').module()(images)\n"
        "print((logits.argmax(1).numpy() == raw.target[test]).mean())\n"
        "assert 'hvd_train' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=280
    )
    assert float(done.stdout.splitlines()[-1]) == pytest.approx(evaluate(trained_run)["top1"])


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
