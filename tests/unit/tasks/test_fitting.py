"""Whether a model and the data fit a task: what is refused before anything starts, and what is left as it was."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from hvd_train.errors import UsageError
from hvd_train.tasks.fitting import fit
from hvd_train.tasks.meter import Meter
from tests.support.tasks import meter_of_classes


def fitted(model: nn.Module, inputs: Tensor) -> Meter:
    """The meter for a model that is to tell ten classes apart."""
    return fit(meter_of_classes().task, model, "m", inputs, torch.zeros(len(inputs), dtype=torch.long), nullcontext())


def test_a_model_that_cannot_take_the_images_is_refused() -> None:
    """With the shape, torch's reason and what to try; the model stays in the mode it was in."""
    model = nn.Sequential(nn.Conv2d(3, 4, 9), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(10)).train()
    with pytest.raises(UsageError, match=r"model m cannot take images of 3 x 8 x 8: .*; try another --image-size"):
        fitted(model, torch.zeros(2, 3, 8, 8))
    assert model.training


@pytest.mark.parametrize(
    ("model", "got"),
    [(nn.Flatten(), r"shape \(2, 4\)"), (nn.AdaptiveMaxPool2d(1, return_indices=True), r"\(tensor, tensor\)")],
)
def test_a_model_that_returns_no_logits_is_refused(model: nn.Module, got: str) -> None:
    """What it returns, and what it must return."""
    with pytest.raises(UsageError, match=rf"model m returns {got}; it must return logits of shape \[batch, 10\]"):
        fitted(model, torch.zeros(2, 1, 2, 2))


def test_looking_whether_a_model_fits_leaves_no_trace() -> None:
    """Statistics of batch norm are those of training alone."""
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 10))
    fitted(model, torch.ones(2, 1, 2, 2))
    assert model[0].num_batches_tracked == 0
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("training", [False, True])
def test_one_image_is_enough_to_see_whether_a_model_fits(training: bool) -> None:
    """In evaluation, without a graph: batch norm takes one image only there. The mode is that of before."""
    seen: list[tuple[bool, bool]] = []
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 10)).train(training)
    model.register_forward_hook(lambda one, *_: seen.append((one.training, torch.is_grad_enabled())))
    fitted(model, torch.ones(1, 1, 2, 2))
    assert seen == [(False, False)]
    assert [module.training for module in model.modules()] == [training] * 4


@pytest.mark.parametrize("error", [RuntimeError, ValueError, AssertionError, TypeError])
def test_only_the_first_line_of_a_models_complaint_is_told(error: type[Exception]) -> None:
    """Torch's go on with what only its developers read."""

    class Complains(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            raise error("too small\nfor this\nmodel")

    with pytest.raises(UsageError) as told:
        fitted(Complains(), torch.zeros(2, 3, 4, 5))
    line = str(told.value)
    assert line.startswith("model m cannot take images of 3 x 4 x 5: too small (")
    assert line.endswith(", in forward); try another --image-size")
    assert "\n" not in line


def test_logits_for_another_number_of_classes_or_images_are_refused() -> None:
    """Both are told."""
    for model, images, got in (
        (nn.Flatten(), torch.zeros(2, 1, 3, 3), r"\(2, 9\)"),
        (nn.Flatten(0), torch.zeros(2, 1, 5, 1), r"\(10,\)"),
        (nn.Unflatten(0, (1, 1)), torch.zeros(1, 10), r"\(1, 1, 10\)"),
    ):
        with pytest.raises(UsageError, match=rf"model m returns shape {got}; it must"):
            fitted(model, images)
