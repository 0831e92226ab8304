"""Each recipe on two ranks with a little data in its real format."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.datasets import CIFAR10
from torchvision.models import get_model, get_model_weights

from hvd_train.config_file import load
from tests.support import cifar, jpegs
from tests.support.launching import HVD_TRAIN, json_lines, launch_line, output_of

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

ON_CPU = ["--device", "cpu", "--workers", "1", "--eval-batch-size", "20", "--output-dir", "run"]


def on_two_ranks(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Train to the end and return summary and output; `home` below the folder is torch's folder of weights."""
    command = launch_line("gloo", 2, HVD_TRAIN, "train", *arguments, *ON_CPU)
    variables = {"TORCH_HOME": "home", "PYTHONPATH": str(folder / "site")}
    output = output_of(command, folder, limit_s=600, variables=variables)
    return json.loads((folder / "run/summary.json").read_text()), output


def offline_weights(folder: Path, model: str) -> None:
    """Write random numbers as the file of weights that torchvision would download."""
    torch.manual_seed(5)
    path = folder / "home/hub/checkpoints" / get_model_weights(model)["DEFAULT"].url.rpartition("/")[2]
    path.parent.mkdir(parents=True)
    torch.save(get_model(model).state_dict(), path)


@pytest.fixture
def with_cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder whose `data` has a few images in CIFAR-10's format, which ranks take for the published one."""
    cifar.unpack(cifar.publish("cifar10", tmp_path / "web", monkeypatch), tmp_path / "data")
    code = "import sys\nif sys.argv[0].endswith('hvd-train'):\n    from torchvision.datasets import CIFAR10\n"
    for name in ("train_list", "test_list", "meta"):
        code += f"    CIFAR10.{name} = {getattr(CIFAR10, name)!r}\n"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(code)
    return tmp_path


def test_cifar10_resnet18_transfer(with_cifar: Path) -> None:
    """Only the new last layer is trained; everything else, statistics included, is as downloaded."""
    offline_weights(with_cifar, "resnet18")
    settings = ["-b", "8", "--accumulation_steps", "4", "--image-size", "32", "--epochs", "2", "--warmup-epochs", "0"]
    summary, output = on_two_ranks(with_cifar, "cifar10-resnet18-transfer", *settings)
    assert summary["epochs"] == 2
    assert "starting from the weights DEFAULT, but a new last layer (fc) for 10 classes" in output
    before = torch.load(next(with_cifar.glob("home/hub/checkpoints/*")), weights_only=True)
    after = torch.load(with_cifar / "run/model-final.pt", weights_only=True)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"fc.weight", "fc.bias"}


def test_cifar10_resnet50(with_cifar: Path) -> None:
    settings = ["-b", "16", "--epochs", "1", "--warmup-epochs", "0"]
    summary, _ = on_two_ranks(with_cifar, "cifar10-resnet50", *settings)
    assert (summary["epochs"], summary["world_size"]) == (1, 2)


def test_imagenet20_vgg19(tmp_path: Path) -> None:
    """The recipe trains 20 classes at a rate of 1.41e-4 on two workers, and tests the best weights at the end."""
    jpegs.digits(tmp_path / "data", range(20), most=2, test=True)
    offline_weights(tmp_path, "vgg19")
    settings = ["--data-dir", "data", "--image-size", "32", "-b", "10", "--epochs", "1", "--lr-base-batch", "10"]
    summary, output = on_two_ranks(tmp_path, "imagenet20-vgg19", *settings, "--log-steps", "1")
    assert "a new last layer (classifier.6) for 20 classes" in output
    steps = [line for line in json_lines(tmp_path / "run/metrics.jsonl") if line["kind"] == "step"]
    rates = {round(step["learning_rate"], 8) for step in steps}
    assert rates == {round(1e-4 * 2**0.5, 8)}
    assert summary["test_loss"] > 0
    assert load(tmp_path / "run/config.yaml").schedule.best_by == "loss"


@pytest.mark.parametrize("recipe", ["imagenet-resnet50", "imagenet-resnet50-modern"])
def test_imagenet_resnet50(recipe: str, tmp_path: Path) -> None:
    """The recipe trains in mixed precision with fp16 on the wire, and records top-1 and top-5 on both sets."""
    jpegs.digits(tmp_path / "data", most=2)  # fp16 is slow on a CPU
    line = "--data-dir data --image-size 32 -b 4 --workers-per-host 2 --warmup-epochs 0 "
    line += {
        "imagenet-resnet50": "--epochs 1",
        "imagenet-resnet50-modern": "--epochs 2 --repeated-augmentation 2 --val-crop-size 40 --val-resize-size 44",
    }[recipe]
    summary, _ = on_two_ranks(tmp_path, recipe, *line.split())
    epochs = [line for line in json_lines(tmp_path / "run/metrics.jsonl") if line["kind"] == "epoch"]
    assert len(epochs) == summary["epochs"] > 0
    assert all(0 <= epochs[-1][name] <= 1 for name in ("top1", "top5", "val_top1", "val_top5"))
    config = load(tmp_path / "run/config.yaml")
    assert (config.precision.precision, config.precision.compression) == ("fp16", "fp16")
