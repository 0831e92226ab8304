"""From stored images to the input of the model."""

from __future__ import annotations

import pytest
import torch

from hvd_train.data.dataset import DataSet
from hvd_train.data.prepare import Prepare
from tests.support.batches import CPU


def test_images_are_scaled_resized_normalised_and_coloured_in_this_order() -> None:
    """Bytes are scaled to 0..1, then resized, then normalised, then repeated as three channels."""
    data = DataSet((), None, ("a",), channels=1, mean=(0.5,), std=(0.25,))  # type: ignore[arg-type]
    prepare = Prepare(data, CPU, image_size=4, augment=None, colour=True)
    result = prepare(torch.full((2, 1, 8, 8), 255, dtype=torch.uint8), None)
    assert result.shape == (2, 3, 4, 4)
    assert torch.equal(result, torch.full((2, 3, 4, 4), 2.0))


@pytest.mark.parametrize("side", [16, 96])
def test_images_are_normalised_alike_one_by_one_and_all_at_once(side: int) -> None:
    """Small and large images of bytes become what floating-point images of the same values become, to the bit."""
    data = DataSet((), None, ("a",), channels=3, mean=(0.5, 0.4, 0.3), std=(0.25, 0.2, 0.1))  # type: ignore[arg-type]
    prepare = Prepare(data, CPU, image_size=side, augment=None, colour=True)
    generator = torch.Generator().manual_seed(side)
    images = torch.randint(0, 256, (3, side, side, 3), dtype=torch.uint8, generator=generator).movedim(-1, 1)
    found = prepare(images, None)
    assert torch.equal(found, prepare(images.float().div(255), None))
    assert found.is_contiguous()
