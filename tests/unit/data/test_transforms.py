"""Random changes of batches and of images, and mixes within a micro-batch."""

import numpy as np
import torch
import torchvision.transforms.functional as TF
from torch import Tensor

from hvd_train.config import DataConfig
from hvd_train.data.sources import affine_jitter, crop_and_flip
from hvd_train.progress import order
from hvd_train.tasks.builtin import mixer


def cropped(image: Tensor, uniforms: Tensor) -> Tensor:
    top, left = (int(u * 5) for u in uniforms[:2])
    part = TF.crop(TF.pad(image, [2]), top, left, *image.shape[1:])
    return part if uniforms[2] < 0.5 else part.flip(2)


def test_crop_and_flip_of_a_batch_changes_each_image_alone() -> None:
    images = torch.arange(66 * 3 * 6 * 5.0).view(66, 3, 6, 5)
    drawn = torch.from_numpy(order.uniforms(1, 2, np.arange(64), 3))
    uniforms = torch.cat([drawn, torch.zeros(1, 3), torch.full((1, 3), 1 - 2**-24)])
    expected = torch.stack([*map(cropped, images, uniforms)])
    assert torch.equal(crop_and_flip(padding=2).apply(images, uniforms), expected)


def test_an_affine_change_turns_shifts_and_zooms() -> None:
    image = torch.zeros(1, 1, 8, 8)
    image[0, 0, 4, 4] = 1
    moved = affine_jitter(degrees=0, shift=0.25, scale=0).apply(
        image, torch.tensor([[0.5, 0.5, 1.0, 0.5]])
    )
    assert moved[0, 0, 4, 2] > 0.99
    turned = affine_jitter(degrees=90, shift=0, scale=0).apply(
        image, torch.tensor([[1.0, 0.5, 0.5, 0.5]])
    )
    assert turned.sum() > 0.99
    assert turned[0, 0, 4, 4] < 0.01


def test_mixup_and_cutmix_take_turns() -> None:
    mix = mixer(DataConfig(mixup=1.0, cutmix=1.0), 2)
    images = torch.stack([torch.zeros(1, 8, 8), torch.ones(1, 8, 8)])
    targets = torch.arange(2)
    torch.manual_seed(0)
    patched = {set(mix(images, targets)[0].unique().tolist()) <= {0.0, 1.0} for _ in range(20)}
    assert patched == {True, False}
