"""Predictions of a trained run."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from hvd_train import recipes
from hvd_train.data.dataset import DataSet
from hvd_train.errors import UsageError
from hvd_train.report.predictions import _png, predict
from hvd_train.run import train
from hvd_train.settings.data import DataConfig
from tests.support.run_folders import start, write


def test_every_validation_image_is_counted_once() -> None:
    """The best weights' hits add up to the score that training returned; the worst images come first."""
    result = train(recipes.digits().replace(epochs=1, device="cpu", workers=0, output_dir=Path("run")))
    predictions = predict(Path("run"), "cpu", trust=True)
    total = sum(predictions.counts.values())
    right = sum(count for (truth, predicted), count in predictions.counts.items() if truth == predicted)
    assert total == 360
    assert right / total == pytest.approx(result.best)
    assert len(predictions.worst) == 12
    assert [image.loss for image in predictions.worst] == sorted((one.loss for one in predictions.worst), reverse=True)
    for image in predictions.worst:
        assert image.truth != image.predicted
        assert 0 < image.confidence <= 1
        assert image.png.startswith(b"\x89PNG")


def test_a_run_without_weights_has_no_predictions() -> None:
    """A run that was stopped before its first evaluation is refused with the file that it lacks."""
    write(Path("run"), [start()])
    with pytest.raises(UsageError, match=r"model-best\.pt"):
        predict(Path("run"), "cpu", trust=True)


def always_the_first(num_classes: int) -> nn.Module:
    """A model that takes every image for class 0, and in training mode for class 1."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            """The logits: the darker an image, the surer."""
            logits = torch.zeros(len(images), num_classes)
            logits[:, int(self.training)] = 100 - images.mean((1, 2, 3))
            return logits + self.weight

    return First()


def test_what_is_predicted_for_which_truth() -> None:
    """Of every class all images but the right ones are mistakes; the worst come first, whatever batch they are in."""
    model = "tests.unit.report.test_predictions:always_the_first"
    small = {"epochs": 1, "device": "cpu", "workers": 0, "output_dir": Path("run"), "model": model}
    train(recipes.digits().replace(**small, learning_rate=1e-9, eval_batch_size=7))
    predictions = predict(Path("run"), "cpu", trust=True)
    assert {predicted for _, predicted in predictions.counts} == {0}
    assert len({truth for truth, _ in predictions.counts}) == 10
    assert all(image.predicted == "0" != image.truth for image in predictions.worst)
    settings = Path("run/config.yaml")
    settings.write_text(settings.read_text().replace("eval_batch_size: 7", "eval_batch_size: 360"))
    at_once = predict(Path("run"), "cpu", trust=True)
    assert [image.sample for image in predictions.worst] == [image.sample for image in at_once.worst]


class Labelled(list[tuple[torch.Tensor, int]]):
    """Images with their labels."""

    classes = ("0", "1", "2")


def mostly_zeros(config: DataConfig) -> tuple[Labelled, Labelled]:
    """Ten images, of which all but two are of class 0."""
    images = Labelled((torch.full((1, 8, 8), 0.1 * n), n if n in (1, 2) else 0) for n in range(10))
    return images, images


def test_an_image_that_is_right_is_no_mistake() -> None:
    """Of a model with two mistakes two are shown, and not the ten images that it was least sure of."""
    model, data = (f"tests.unit.report.test_predictions:{name}" for name in ("always_the_first", "mostly_zeros"))
    small = {"epochs": 1, "device": "cpu", "workers": 0, "output_dir": Path("run"), "model": model, "data": data}
    train(recipes.digits().replace(**small, learning_rate=1e-9, global_batch_size=10))
    assert sorted(image.sample for image in predict(Path("run"), "cpu", trust=True).worst) == [1, 2]


def test_a_picture_has_the_colours_of_the_image() -> None:
    """The mean and the standard deviation by which the model sees it are taken back."""
    data = DataSet((), None, ("a",), channels=1, mean=(0.5,), std=(0.25,))  # type: ignore[arg-type]
    values = torch.tensor([[[0.2, 0.4], [0.6, 0.8]]])
    shown = Image.open(io.BytesIO(_png((values - 0.5) / 0.25, data)))
    assert np.asarray(shown)[:, :, 0].tolist() == [[51, 102], [153, 204]]
