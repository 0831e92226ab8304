"""Each recipe on two ranks with a little data in its real format."""

import json
from pathlib import Path

import pytest
import torch
from torchvision.datasets import CIFAR10
from torchvision.models import get_model, get_model_weights

from tests.support import cifar, jpegs
from tests.support.launching import HVD_TRAIN, launch_line, output_of, records

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

ON_CPU = "--device cpu --workers 1 --eval-batch-size 20 --output-dir run --warmup-epochs 0"
MODERN = "--image-size 32 -b 4 --epochs 2 --val-crop-size 40 --val-resize-size 44"


@pytest.mark.parametrize(
    ("recipe", "figure", "least", "most"),
    [
        ("diabetes-regression", "error", 0.0, 0.46),
        ("digits-segmentation", "mean_iou", 0.9, 1.0),
        ("python-language-model", "perplexity", 1.0, 6.0),
        ("gpt", "perplexity", 1.0, 6.0),
    ],
)
def test_a_recipe_of_another_task_reaches_its_figure(
    recipe: str, figure: str, least: float, most: float, tmp_path: Path
) -> None:
    """Its run can be evaluated without --trust."""
    train = f"train {recipe} --device cpu --output-dir run".split()
    output_of(launch_line("gloo", 2, HVD_TRAIN, *train), tmp_path)
    scores = json.loads(output_of([HVD_TRAIN, "evaluate", "run", "--json"], tmp_path))
    assert least <= scores[figure] <= most


@pytest.mark.parametrize(
    ("recipe", "settings", "weights_of"),
    [
        (
            "cifar10-resnet18-transfer",
            "-b 8 --accumulation_steps 4 --image-size 32 --epochs 2",
            "resnet18",
        ),
        ("cifar10-resnet50", "-b 16 --epochs 1", None),
        ("imagenet20-vgg19", "--image-size 32 -b 10 --epochs 1 --lr-base-batch 10", "vgg19"),
        ("imagenet-resnet50", "--image-size 32 -b 4 --epochs 1", None),
        ("imagenet-resnet50-modern", MODERN, None),
    ],
)
def test_a_recipe(
    recipe: str,
    settings: str,
    weights_of: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It records top-1 and top-5 on both sets, and starts from the
    downloaded weights if it has some.
    """
    if recipe.startswith("cifar"):
        cifar.unpack(cifar.publish("cifar10", tmp_path / "web", monkeypatch), tmp_path / "data")
        # Ranks take the archive for the published one.
        code = (
            "import sys\nif sys.argv[0].endswith('hvd-train'):\n    from "
            "torchvision.datasets import CIFAR10\n"
        )
        for name in ("train_list", "test_list", "meta"):
            code += f"    CIFAR10.{name} = {getattr(CIFAR10, name)!r}\n"
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "sitecustomize.py").write_text(code)
    else:
        jpegs.digits(
            tmp_path / "data", range(20 if "20" in recipe else 10), most=2, test="20" in recipe
        )
        settings += " --data-dir data"
    if weights_of is not None:  # random numbers, in the file that torchvision would download
        folder = tmp_path / "home/hub/checkpoints"
        folder.mkdir(parents=True)
        name = Path(get_model_weights(weights_of)["DEFAULT"].url).name
        torch.save(get_model(weights_of).state_dict(), folder / name)
    command = launch_line("gloo", 2, HVD_TRAIN, "train", recipe, *settings.split(), *ON_CPU.split())
    variables = {"TORCH_HOME": "home", "PYTHONPATH": str(tmp_path / "site")}
    output = output_of(command, tmp_path, limit_s=600, variables=variables)
    assert ("starting from the weights DEFAULT, but a new last layer" in output) == (
        weights_of is not None
    )
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    epochs = records("epoch", tmp_path / "run")
    assert (summary["world_size"], len(epochs)) == (2, summary["epochs"])
    assert all(0 <= epochs[-1][name] <= 1 for name in ("top1", "top5", "val_top1", "val_top5"))
