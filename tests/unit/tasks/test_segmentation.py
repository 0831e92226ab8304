"""Mean IoU against scikit-learn, and pixels that do not count."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.metrics import (
    accuracy_score,
    jaccard_score,
)
from torch import Tensor

from hvd_train.tasks.language_model import language_model
from hvd_train.tasks.segmentation import segmentation
from tests.support.task_figures import in_training, scored

pytestmark = pytest.mark.numeric


def test_mean_iou_is_that_of_scikit_learn(draw: torch.Generator) -> None:
    """Over the classes that a pixel has or is said to have; pixels of class 255 count nowhere."""
    classes = tuple("abcdef")
    targets = torch.randint(4, (9, 5, 7), generator=draw, dtype=torch.uint8)  # none of the classes e and f
    logits = torch.randn(9, 6, 5, 7, generator=draw)
    logits[:, 5] = -9.0  # and nobody says f
    targets[torch.rand(targets.shape, generator=draw) < 0.2] = 255
    scores = scored(segmentation(classes), logits, targets)
    counted = targets != 255
    truth, predicted = targets[counted].numpy(), logits.argmax(1)[counted].numpy()
    expected = jaccard_score(truth, predicted, labels=[0, 1, 2, 3, 4], average=None, zero_division=0)
    assert [*scores.per_class.values()][:5] == pytest.approx(expected, rel=1e-12)
    assert math.isnan(scores.per_class["f"])
    assert scores["miou"] == pytest.approx(jaccard_score(truth, predicted, average="macro"), rel=1e-12)
    assert scores["pixel_accuracy"] == pytest.approx(accuracy_score(truth, predicted), rel=1e-12)
    assert in_training(segmentation(classes), logits, targets)["pixel_accuracy"] == scores["pixel_accuracy"]


def test_ignored_pixels_have_no_loss() -> None:
    """The loss of a picture is the mean over its other pixels; of one without any it is 0, and so is the gradient."""
    logits = torch.randn(2, 3, 1, 2, generator=torch.Generator().manual_seed(1)).requires_grad_()
    targets = torch.tensor([[[2, 255]], [[255, 255]]])
    losses = segmentation(("a", "b", "c")).loss(logits, targets)
    assert losses.tolist() == [pytest.approx(-logits[0, :, 0, 0].log_softmax(0)[2].item()), 0.0]
    torch.autograd.backward(losses.sum())
    assert logits.grad is not None
    assert logits.grad[0, :, 0, 0].count_nonzero() == 3
    assert not logits.grad[0, :, 0, 1].any()
    assert not logits.grad[1].any()


def test_models_may_return_their_logits_under_a_name() -> None:
    """Under "out" as those of torchvision for segmentation, as `.logits` as those of Hugging Face for texts."""

    class Answer:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    pixels, truth = torch.randn(2, 3, 4, 4), torch.randint(3, (2, 4, 4))
    task = segmentation(("a", "b", "c"))
    assert task.refusal({"out": pixels, "aux": None}, truth) is None
    assert torch.equal(task.loss({"out": pixels}, truth), task.loss(pixels, truth))
    text, tokens = torch.randn(2, 4, 5), torch.randint(5, (2, 4))
    assert language_model(5).refusal(Answer(text), tokens) is None
    assert torch.equal(language_model(5).loss(Answer(text), tokens), language_model(5).loss(text, tokens))
