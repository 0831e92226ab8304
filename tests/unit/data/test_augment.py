"""Augmentation of whole batches, compared with a plain one of single images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hvd_train.data.augment import affine_jitter, crop_and_flip
from hvd_train.progress import order

pytestmark = pytest.mark.numeric


def cropped(image: Tensor, uniforms: Tensor, padding: int) -> Tensor:
    """Return one image, shifted and mirrored by plain indexing."""
    _, height, width = image.shape
    padded = F.pad(image, (padding,) * 4)
    top, left = (int(u * (2 * padding + 1)) for u in uniforms[:2])
    part = padded[:, top : top + height, left : left + width]
    return part if uniforms[2] < 0.5 else part.flip(2)


def test_crop_and_flip_is_the_slow_one_image_by_image() -> None:
    """Shifts in both directions by all amounts, mirrored or not, are those of the plain version."""
    images = torch.arange(64 * 3 * 6 * 5.0).view(64, 3, 6, 5)
    uniforms = torch.from_numpy(order.uniforms(1, 2, np.arange(64), 3))
    result = crop_and_flip(padding=2).apply(images, uniforms)
    expected = torch.stack([cropped(i, u, 2) for i, u in zip(images, uniforms, strict=True)])
    assert torch.equal(result, expected)


def test_crop_stays_within_the_padding_at_both_ends() -> None:
    """The smallest and the largest random number shift by the whole padding and not beyond it."""
    images = torch.ones(2, 1, 4, 4)
    ends = torch.tensor([[0.0, 0.0, 0.0], [1 - 2**-24] * 3])
    result = crop_and_flip(padding=1).apply(images, ends)
    assert result[0, 0].sum() == 9
    assert result[1, 0].sum() == 9
    assert result[0, 0, 0].sum() == 0
    assert result[1, 0, -1].sum() == 0


def test_an_affine_change_of_nothing_is_the_image() -> None:
    """Random numbers in the middle of their range neither turn, move nor zoom an image."""
    images = torch.cos(torch.arange(3 * 64.0).view(3, 1, 8, 8))
    result = affine_jitter(degrees=10, shift=0.1, scale=0.1).apply(images, torch.full((3, 4), 0.5))
    torch.testing.assert_close(result, images, atol=1e-5, rtol=0)


def test_an_affine_shift_moves_by_that_share_of_the_side() -> None:
    """A shift of a quarter of eight pixels is two pixels."""
    image = torch.zeros(1, 1, 8, 8)
    image[0, 0, 4, 4] = 1
    moved = affine_jitter(degrees=0, shift=0.25, scale=0).apply(image, torch.tensor([[0.5, 0.5, 1.0, 0.5]]))
    assert moved[0, 0, 4, 2] > 0.99
    turned = affine_jitter(degrees=90, shift=0, scale=0).apply(image, torch.tensor([[1.0, 0.5, 0.5, 0.5]]))
    assert turned.sum() > 0.99
    assert turned[0, 0, 4, 4] < 0.01
