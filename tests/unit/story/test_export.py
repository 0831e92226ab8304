"""A trained model for use elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hvd_train import export as exports
from hvd_train.cli import run
from hvd_train.errors import UsageError
from hvd_train.export import export
from hvd_train.run import evaluate
from tests.support import runs
from tests.support.runs import equal


@pytest.fixture
def trained_run() -> Path:
    """A run of the default recipe, of one epoch."""
    assert run(["train", "digits", "--epochs", "1", "--output-dir", "run", "--device", "cpu"]) == 0
    return Path("run")


def test_the_program_runs_without_us_and_scores_the_same(trained_run: Path) -> None:
    """In a process without this package, on any number of images, with the normalisation that the card names."""
    written = export(trained_run, Path("out"), onnx=False)
    assert [path.name for path in written] == ["weights.pt", "model.pt2", "model.json"]
    program = (
        "import json, sys, torch\n"
        "from sklearn.datasets import load_digits\n"
        "import numpy as np\n"
        "card = json.load(open('out/model.json'))\n"
        "raw = load_digits()\n"
        "test = np.random.default_rng(1998).permutation(len(raw.target))[:360]\n"
        "images = torch.from_numpy((raw.images[test] * (255 / 16)).round()).float()[:, None] / 255\n"
        "images = (images - torch.tensor(card['mean']).view(-1, 1, 1)) / torch.tensor(card['std']).view(-1, 1, 1)\n"
        "logits = torch.export.load('out/model.pt2').module()(images)\n"
        "print((logits.argmax(1).numpy() == raw.target[test]).mean())\n"
        "assert 'hvd_train' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert float(done.stdout.splitlines()[-1]) == pytest.approx(evaluate(trained_run)["top1"])


def test_the_weights_are_the_best_ones(trained_run: Path) -> None:
    """A plain state_dict, equal to the run's."""
    export(trained_run, Path("out"), onnx=False)
    assert equal(
        torch.load("out/weights.pt", weights_only=True), torch.load(trained_run / "model-best.pt", weights_only=True)
    )
    assert json.loads(Path("out/model.json").read_text())["input"] == ["batch", 1, 8, 8]


def test_a_program_that_computes_something_else_is_refused() -> None:
    """The files are checked by running them."""

    class Counting(nn.Module):
        """Another result with each call."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.calls = runs.convnet(10), 0

        def forward(self, images: Tensor) -> Tensor:
            self.calls += 1
            result: Tensor = self.body(images) + self.calls
            return result

    model = Counting().eval()
    images = torch.randn(3, 1, 8, 8)
    with pytest.raises(UsageError, match="gives other logits than the model"):
        exports._program(model, images, model(images).detach(), Path("model.pt2"))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nothing"], "nothing: no such run folder, checkpoint or file of weights"),
        (["run", "--onnx"], "--onnx needs onnxruntime: pip install onnx onnxscript onnxruntime"),
    ],
)
def test_what_cannot_be_exported(
    arguments: list[str], reason: str, trained_run: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One line, exit code 2."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert run(["export", *arguments]) == 2
    assert reason in capsys.readouterr().err
