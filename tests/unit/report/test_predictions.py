"""Predictions of a trained run."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_train import recipes
from hvd_train.errors import UsageError
from hvd_train.report.predictions import predict
from hvd_train.run import train
from tests.support.run_folders import start, write


def test_every_validation_image_is_counted_once() -> None:
    """The best weights' hits add up to the score that training returned; the worst images come first."""
    result = train(recipes.digits().replace(epochs=1, device="cpu", workers=0, output_dir=Path("run")))
    predictions = predict(Path("run"), "cpu")
    total = sum(predictions.counts.values())
    right = sum(count for (truth, predicted), count in predictions.counts.items() if truth == predicted)
    assert total == 360
    assert right / total == pytest.approx(result.best_top1)
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
        predict(Path("run"), "cpu")
