"""Random changes: of batches in memory, of images in files and of micro-batches. torchvision is slow to import."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hvd_train.config import DataConfig
from hvd_train.data.dataset import Augment

Mixer = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # (images, class numbers [n]) to (images, any targets)


def crop_and_flip(padding: int) -> Augment:
    """Return a change that shifts images by up to `padding` pixels and mirrors half of them."""

    def apply(images: Tensor, uniforms: Tensor) -> Tensor:
        n, channels, height, width = images.shape
        padded = F.pad(images, (padding,) * 4)
        top, left = (uniforms[:, :2] * (2 * padding + 1)).long().unbind(1)
        rows = top[:, None] + torch.arange(height, device=images.device)
        columns = left[:, None] + torch.arange(width, device=images.device)
        columns = torch.where(uniforms[:, 2:3] < 0.5, columns, columns.flip(1))
        # One gather takes a third of the time of an index for each dimension.
        pixels = rows[:, :, None] * padded.shape[3] + columns[:, None, :]
        pixels = pixels.view(n, 1, height * width).expand(-1, channels, -1)
        return padded.flatten(2).gather(2, pixels).view(images.shape)

    return Augment(3, apply)


def affine_jitter(degrees: float, shift: float, scale: float) -> Augment:
    """Return a change that turns, moves and zooms images; `shift` and `scale` are shares of the side."""

    def apply(images: Tensor, uniforms: Tensor) -> Tensor:
        turn, zoom, x, y = (2 * uniforms - 1).unbind(1)
        angle, zoom = turn * math.radians(degrees), 1 + zoom * scale
        cos, sin = torch.cos(angle) * zoom, torch.sin(angle) * zoom
        # For grid_sample an image spans -1..1, so that a shift by its whole side is 2.
        theta = torch.stack([cos, -sin, 2 * shift * x, sin, cos, 2 * shift * y], dim=1).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(images.shape), align_corners=False)
        return F.grid_sample(images, grid, align_corners=False)

    return Augment(4, apply)


def training_transform(config: DataConfig, usual: Sequence[Any], mean: tuple[float, ...]) -> Any:
    """Return a transform of uint8 images: the `usual` ones, then the config's.

    The order follows torchvision's training references. TrivialAugment: Müller and Hutter, arXiv 2103.10158.
    RandAugment: Cubuk et al., arXiv 1909.13719, with their 2 operations of magnitude 9. Random erasing: Zhong et al.,
    arXiv 1708.04896, filled with the colour `mean` (values 0..1).
    """
    from torchvision.transforms import v2

    steps = list(usual)
    if config.augment == "trivial":
        steps.append(v2.TrivialAugmentWide(interpolation=v2.InterpolationMode.BILINEAR))
    if config.augment == "rand":
        steps.append(v2.RandAugment(interpolation=v2.InterpolationMode.BILINEAR))
    if config.random_erasing > 0:
        steps.append(v2.RandomErasing(p=config.random_erasing, value=[round(255 * share) for share in mean]))
    return v2.Compose(steps or [v2.Identity()])


def mixer(config: DataConfig, num_classes: int) -> Mixer:
    """Return mixup or cutmix of a micro-batch, one of them at random, or neither, as the config says.

    Zhang et al., arXiv 1710.09412; Yun et al., arXiv 1905.04899. Targets become shares, [n, classes].
    """
    if not (config.mixup or config.cutmix):
        return lambda images, targets: (images, targets)
    from torchvision.transforms import v2

    kinds = ((v2.MixUp, config.mixup), (v2.CutMix, config.cutmix))
    mixers = [kind(alpha=alpha, num_classes=num_classes) for kind, alpha in kinds if alpha > 0]
    found: Mixer = mixers[0] if len(mixers) == 1 else v2.RandomChoice(mixers)
    return found
